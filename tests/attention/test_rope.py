"""Rotary embedding: the rotation itself, its two pairings, and frequencies against transformers' own modules."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ROPES, tiny_config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from attention.errors import Refusal
from attention.rope import Pairing, Rotary, from_config

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotary(pairs: int, pairing: Pairing = "half", factor: float = 1.0) -> Rotary:
    return Rotary(10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs), pairing, factor)


@pytest.mark.parametrize("kind", [kind for kind in ROPES if kind != "dynamic"])
def test_frequencies_and_attention_factor_are_those_of_transformers(kind: str) -> None:
    config = tiny_config("llama", rope_parameters=ROPES[kind])
    module, ours = LlamaRotaryEmbedding(config), from_config(config, 8)
    assert ours.frequencies.dtype == torch.float64
    torch.testing.assert_close(ours.frequencies, module.inv_freq.double(), rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(module.attention_scaling, rel=1e-12)
    assert (ours.attention_factor != 1) == (kind in ("yarn", "longrope"))
    if kind != "default":
        plain = from_config(tiny_config("llama"), 8)
        assert not torch.allclose(ours.frequencies, plain.frequencies, rtol=1e-3), "scaling is seen"


def test_a_layer_type_without_an_entry_takes_the_common_one_and_the_pairing_is_the_callers() -> None:
    config = tiny_config("llama", rope_parameters={"rope_theta": 777.0, "rope_type": "linear", "factor": 2.0})
    found = from_config(config, 8, "interleaved", layer_type="full_attention")
    assert torch.equal(found.frequencies, from_config(config, 8).frequencies)
    assert found.pairing == "interleaved"


@pytest.mark.parametrize("pairing", PAIRINGS)
@settings(deadline=None)
@given(heads=st.integers(1, 4), pairs=st.integers(1, 6), rest=st.integers(0, 4), seed=st.integers(0, 99))
def test_the_complex_view_has_an_inverse(pairing: Pairing, heads: int, pairs: int, rest: int, seed: int) -> None:
    rotation = rotary(pairs, pairing)
    for shape in ((heads, 2 * pairs + rest, 3), (heads, 2 * pairs + rest)):  # weights, and biases
        rows = random(*shape, seed=seed)
        numbers, nope = rotation.to_complex(rows)
        assert numbers.shape == (heads, pairs, *shape[2:])
        assert nope.shape == (heads, rest, *shape[2:])
        assert torch.equal(rotation.from_complex(numbers, nope), rows)
        assert torch.equal(rotation.from_complex(numbers), rows[:, : 2 * pairs])


def test_the_complex_view_names_the_dims_of_each_pair() -> None:
    rows = torch.arange(7.0)[None]
    half, nope = rotary(3, "half").to_complex(rows)
    assert half.tolist() == [[0 + 3j, 1 + 4j, 2 + 5j]]
    assert nope.tolist() == [[6]]
    assert rotary(3, "interleaved").to_complex(rows)[0].tolist() == [[0 + 1j, 2 + 3j, 4 + 5j]]


@pytest.mark.parametrize("pairing", PAIRINGS)
@settings(deadline=None)
@given(pairs=st.integers(1, 6), rest=st.integers(0, 4), position=st.integers(0, 5000), seed=st.integers(0, 99))
def test_turning_multiplies_the_complex_view_by_a_phase(
    pairing: Pairing, pairs: int, rest: int, position: int, seed: int
) -> None:
    rotation, rows = rotary(pairs, pairing), random(3, 2 * pairs + rest, seed=seed)
    rotated = rotation.rotation(torch.tensor([position]), rows.dtype)(rows[:, None])[:, 0]
    numbers, nope = rotation.to_complex(rows)
    expected = rotation.from_complex(numbers * torch.exp(1j * rotation.frequencies * position), nope)
    torch.testing.assert_close(rotated, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_selected_pairs_turn_as_they_did_repeated_ones_too(pairing: Pairing) -> None:
    whole, pairs, positions = rotary(5, "half", factor=1.5), [3, 0, 3, 4], torch.arange(6) * 11
    chosen = whole.select(pairs, pairing)
    assert (chosen.dims, chosen.pairing, chosen.attention_factor) == (8, pairing, 1.0)
    assert chosen.frequencies.tolist() == [whole.frequencies[pair] for pair in pairs]
    states = random(2, 10, 6)
    numbers, _ = whole.to_complex(states)
    rotated = whole.to_complex(whole.rotation(positions, states.dtype)(states.mT).mT)[0][:, pairs]
    found = chosen.rotation(positions, states.dtype)(chosen.from_complex(numbers[:, pairs]).mT).mT
    torch.testing.assert_close(1.5 * chosen.to_complex(found)[0], rotated, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("length", [31, 32, 33])
def test_longrope_switches_lists_where_transformers_does(length: int) -> None:
    config = tiny_config("llama", rope_parameters=ROPES["longrope"])
    q, positions = random(1, 2, length, 8).float(), torch.arange(length)
    expected, _ = apply_rotary_pos_emb(q, q, *LlamaRotaryEmbedding(config)(q, positions[None]))
    ours = from_config(config, 8)
    torch.testing.assert_close(ours.rotation(positions, q.dtype)(q), expected, rtol=1e-5, atol=1e-5)
    fixed = Rotary(ours.long_frequencies if length <= 32 else ours.frequencies, "half", ours.attention_factor)
    assert not torch.allclose(fixed.rotation(positions, q.dtype)(q), expected, atol=1e-2), "the two lists have to differ"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "spiral"}, "RoPE of type 'spiral' is unknown"),
        (ROPES["longrope"] | {"short_factor": [1.0, 2.0]}, "do not fit heads of 64"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 2 / 64},
            "do not fit heads of 64: .*division by zero",
        ),
        ({"rope_type": "linear", "factor": 1e-60}, "give frequencies that are not finite"),
    ],
)
def test_rope_parameters_that_mean_nothing_are_refused(parameters: dict[str, Any], message: str) -> None:
    config = tiny_config("llama", head_dim=64)
    config.rope_parameters = {"rope_theta": 10000.0, **parameters}
    with pytest.raises(Refusal, match=message):
        from_config(config, 64)


@pytest.mark.parametrize("head_dim", [1, 7])
def test_an_odd_head_cannot_be_turned_as_a_whole(head_dim: int) -> None:
    config = tiny_config("llama", head_dim=8)
    with pytest.raises(Refusal, match=f"heads of {head_dim} dims cannot have {head_dim + 1} rotary dims: RoPE rotates pairs"):
        from_config(config, head_dim)
