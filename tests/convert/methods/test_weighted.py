"""The rotary part of `weighted`: its components against sums over distances."""

import dataclasses

import pytest
import torch
from records import blocks_of, inputs, measured, record

from attention.forward import attention_output
from attention.record import Attention
from attention.rope import Rotary
from convert.methods.distances import waves_at
from convert.methods.latent import Allocation, rotary_of
from convert.methods.statistics import Statistics
from convert.methods.weighted import RopeKeys, factor, rotating


def keys_of(a: Attention, text: bool = True) -> RopeKeys:
    return RopeKeys.of(a, measured(inputs(a.q.shape[2])) if text else Statistics.assumed(a.q.shape[2]))


@pytest.mark.parametrize("text", [False, True])
def test_all_components_together_are_the_keys(text: bool) -> None:
    keys = keys_of(record(3, 2, 4, 1, 30), text)
    every = tuple(pair for pair in range(4) for _ in range(3))
    whole = torch.einsum("hlm,me->hle", *keys.kept(every))
    torch.testing.assert_close(whole, keys.z.repeat_interleave(2, 0), rtol=1e-9, atol=1e-9)
    assert not keys.split(every)[1][:, :8].any(), "nothing but rounding is left"


def test_what_does_not_turn_is_the_mean_over_the_distances() -> None:
    a = record(2, 2, 3, 0, 30)
    keys = keys_of(a)
    coefficients, shared = keys.kept((1,))
    rest = torch.complex(*keys.split((1,))[1].unflatten(1, (2, 3)).unbind(1))  # half-split, as the record's
    distance = torch.arange(keys.mass.shape[1], dtype=torch.float64)
    for h in range(4):
        left = keys.z[h // 2] - coefficients[h] @ shared
        turned = torch.exp(-1j * distance[:, None] * rotary_of(a).frequencies)[..., None] * left
        torch.testing.assert_close(rest[h], (keys.mass[h][:, None, None] * turned).sum(0), rtol=1e-9, atol=1e-9)


def test_what_a_component_loses_is_what_not_turning_costs() -> None:
    """MHA, one head: λ² E|z|² (1 − |φ|²) at each frequency."""
    keys = keys_of(record(1, 1, 4, 0, 30))
    energy = torch.einsum("gle,gle->l", keys.moved, keys.z.conj()).real
    expected = keys.importance[0].square() * energy * (1 - keys.phase[0].abs().square())
    torch.testing.assert_close(keys.components[0][:, 0], expected / expected.sum(), rtol=1e-9, atol=0)


def test_frequencies_are_tried_on_attentions_that_lose_nothing_else() -> None:
    """With all of them it is the source, but for the constant of its values; with some, what a latent of full size is."""
    a, x = dataclasses.replace(record(2, 2, 3, 1, 30), v_bias=None, o_bias=None), inputs(30)
    made = rotating(a, measured(x))
    expected = attention_output(a, blocks_of(x))
    torch.testing.assert_close(attention_output(made((0, 0, 1, 1, 2, 2)), blocks_of(x)), expected, rtol=1e-4, atol=1e-5)
    fewer = factor(a, Allocation(30, (0, 2)), measured(x))
    found = attention_output(made((0, 2)), blocks_of(x))
    torch.testing.assert_close(
        found, attention_output(dataclasses.replace(fewer, o_bias=None), blocks_of(x)), rtol=1e-3, atol=1e-4
    )
    assert not torch.allclose(found, expected, rtol=1e-2, atol=1e-2)


def test_phases_turn_as_the_sequence_does() -> None:
    """LongRoPE: beyond its limit all of a sequence rotates by the long list, in the attention and in the phases."""
    short, long = (torch.tensor(values, dtype=torch.float64) for values in ([1.0, 0.3, 0.1], [0.5, 0.1, 0.01]))
    a = dataclasses.replace(record(2, 2, 3, 0, 20), rotary=Rotary(short, long_frequencies=long, long_beyond=20))
    for tokens, expected in ((20, short), (21, long)):
        waves = waves_at(rotary_of(a), RopeKeys.of(a, measured(inputs(20, tokens=tokens))).mass)
        torch.testing.assert_close(waves[1], torch.exp(-1j * expected))
