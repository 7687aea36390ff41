"""The oracle itself, against torch: grouped and latent attention, and QK-norm. Families are held against it elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention

from attention.qk_norm import QKNorm
from attention.record import Attention, FactoredAttention
from attention.reference import grouped_attention, latent_attention
from attention.rope import Rotary

WIDTH = 12


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(heads: int, groups: int, dim: int, seed: int = 1) -> dict[str, torch.Tensor]:
    return {
        "q": random(heads, dim, WIDTH, seed=seed),
        "k": random(groups, dim, WIDTH, seed=seed + 1),
        "v": random(groups, dim, WIDTH, seed=seed + 2),
        "o": random(WIDTH, heads, dim, seed=seed + 3),
    }


def biases(heads: int, groups: int, dim: int, seed: int = 9) -> dict[str, torch.Tensor]:
    return {
        "q_bias": random(heads, dim, seed=seed),
        "k_bias": random(groups, dim, seed=seed + 1),
        "v_bias": random(groups, dim, seed=seed + 2),
        "o_bias": random(WIDTH, seed=seed + 3),
    }


def rotary(pairs: int) -> Rotary:
    return Rotary(10.0 ** -torch.arange(pairs, dtype=torch.float64))


def norm(scope: Any, heads: int, dim: int, kind: Any = "rms", **changes: Any) -> QKNorm:
    return QKNorm(kind, scope, random(heads, dim, seed=20), None, **({"eps": 1e-5} | changes))


@settings(deadline=None, max_examples=40)
@given(
    groups=st.integers(1, 4), share=st.integers(1, 4), dim=st.integers(1, 9), length=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_attention_is_that_of_torch(groups: int, share: int, dim: int, length: int, seed: int) -> None:
    heads, x = groups * share, random(2, length, WIDTH, seed=seed)
    w, b = weights(heads, groups, dim, seed), biases(heads, groups, dim, seed)

    def project(name: str) -> torch.Tensor:
        return linear(x, w[name].flatten(0, 1), b[f"{name}_bias"].flatten()).unflatten(-1, (-1, dim)).transpose(1, 2)

    context = scaled_dot_product_attention(
        project("q"), project("k"), project("v"), is_causal=True, scale=0.37, enable_gqa=True
    )
    expected = linear(context.transpose(1, 2).flatten(2), w["o"].flatten(1), b["o_bias"])
    torch.testing.assert_close(grouped_attention(x, Attention(**w, **b, scale=0.37)), expected, rtol=1e-9, atol=1e-9)


def test_a_sink_is_one_more_token_of_no_value() -> None:
    """Its key is such that every query of a head meets the head's sink; torch has it as the first of the tokens."""
    heads, x, w, sinks = 4, random(2, 7, WIDTH), weights(4, 2, 6), random(4, seed=30)

    def project(name: str) -> torch.Tensor:
        return linear(x, w[name].flatten(0, 1)).unflatten(-1, (-1, 6)).transpose(1, 2)

    meets = torch.cat((project("q"), sinks[:, None, None].expand(2, heads, 7, 1) / 0.37), -1)
    keys = torch.nn.functional.pad(project("k"), (0, 1)).repeat_interleave(2, 1)
    sink = torch.nn.functional.one_hot(torch.tensor(6), 7).double().expand(2, heads, 1, 7)
    values = torch.nn.functional.pad(project("v").repeat_interleave(2, 1), (0, 0, 1, 0))
    seen = torch.ones(7, 8, dtype=torch.bool).tril(1)
    context = scaled_dot_product_attention(meets, torch.cat((sink, keys), 2), values, seen, scale=0.37)
    expected = linear(context.transpose(1, 2).flatten(2), w["o"].flatten(1))
    found = grouped_attention(x, Attention(**w, scale=0.37, sinks=sinks))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    without = grouped_attention(x, Attention(**w, scale=0.37))
    assert (found - without).norm() > 0.1 * without.norm()
    far_off = grouped_attention(x, Attention(**w, scale=0.37, sinks=torch.full_like(sinks, -1e3)))
    torch.testing.assert_close(far_off, without, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("after", [False, True], ids=["before rotary", "after rotary"])
def test_queries_and_keys_are_normalised_on_the_right_side_of_the_rotation(after: bool) -> None:
    x, w, rotation, length = random(2, 7, WIDTH), weights(4, 2, 6), rotary(3), 7
    q_norm, k_norm = norm("head", 1, 6, after_rotary=after), norm("all", 2, 6, after_rotary=after)

    def place(name: str, normalise: QKNorm) -> torch.Tensor:
        states = torch.einsum("bte,hde->bhtd", x, w[name])
        positions = torch.arange(length)
        return normalise(rotation.rotate(states, positions)) if after else rotation.rotate(normalise(states), positions)

    values = torch.einsum("bte,hde->bhtd", x, w["v"])
    context = scaled_dot_product_attention(
        place("q", q_norm), place("k", k_norm), values, is_causal=True, scale=0.5, enable_gqa=True
    )
    expected = torch.einsum("bhtd,ehd->bte", context, w["o"])
    attention = Attention(**w, scale=0.5, rotary=rotation, q_norm=q_norm, k_norm=k_norm)
    found = grouped_attention(x, attention)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    other = dataclasses.replace(q_norm, after_rotary=not after)
    assert not torch.allclose(found, grouped_attention(x, dataclasses.replace(attention, q_norm=other)))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_are_those_of_torch(kind: Any, biased: bool, offset: float) -> None:
    """Of each head, with gains that heads share or of its own, and of all heads as one vector."""
    states, gain, bias = random(2, 4, 5, 6), random(4, 6, seed=1), random(4, 6, seed=2) if biased else None

    def torchs(x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        if kind == "layer":
            return layer_norm(x, weight.shape, weight + offset, added, 1e-3)
        return rms_norm(x, weight.shape, weight + offset, 1e-3) + (0 if added is None else added)

    for heads in (1, 4):
        rows = None if bias is None else bias[:heads]
        found = QKNorm(kind, "head", gain[:heads], rows, 1e-3, offset)(states)
        for head in range(4):
            row = head % heads
            expected = torchs(states[:, head], gain[row], None if rows is None else rows[row])
            torch.testing.assert_close(found[:, head], expected, rtol=1e-12, atol=1e-12)
    flat = torchs(states.transpose(1, 2).flatten(2), gain.flatten(), None if bias is None else bias.flatten())
    found = QKNorm(kind, "all", gain, bias, 1e-3, offset)(states).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, flat, rtol=1e-12, atol=1e-12)


def test_heads_have_gains_of_their_own_where_they_are_stored_or_normalised_together() -> None:
    assert not norm("head", 1, 6).per_head_gains
    assert norm("head", 4, 6).per_head_gains
    assert norm("all", 4, 6).per_head_gains
    assert norm("all", 1, 6).per_head_gains


# ---- latent attention ----------------------------------------------------------------------------------------------


def latent_weights(heads: int, dim: int, rope: int, rank: int, seed: int = 1) -> dict[str, torch.Tensor]:
    shapes = {
        "q_nope": (heads, dim, WIDTH), "q_rope": (heads, rope, WIDTH), "k_rope": (rope, WIDTH), "down": (rank, WIDTH),
        "up_k": (heads, dim, rank), "up_v": (heads, dim, rank), "o": (WIDTH, heads, dim),
    }  # fmt: skip
    return {name: random(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def latent_biases(heads: int, dim: int, rope: int, seed: int = 30) -> dict[str, torch.Tensor]:
    shapes = {"q_nope_bias": (heads, dim), "q_rope_bias": (heads, rope), "k_rope_bias": (rope,), "o_bias": (WIDTH,)}
    return {name: random(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


@settings(deadline=None, max_examples=40)
@given(heads=st.integers(1, 4), dim=st.integers(1, 5), pairs=st.integers(1, 4), rank=st.integers(1, 9), seed=st.integers(0, 99))
def test_latent_attention_is_that_of_torch_on_expanded_heads(heads: int, dim: int, pairs: int, rank: int, seed: int) -> None:
    x, rotation = random(2, 8, WIDTH, seed=seed), rotary(pairs)
    w, b = latent_weights(heads, dim, 2 * pairs, rank, seed), latent_biases(heads, dim, 2 * pairs)
    latent = linear(x, w["down"])
    queries, keys, values = [], [], []
    for h in range(heads):
        rotated = rotation.rotate(linear(x, w["q_rope"][h], b["q_rope_bias"][h]), torch.arange(8))
        queries.append(torch.cat((linear(x, w["q_nope"][h], b["q_nope_bias"][h]), rotated), -1))
        shared = rotation.rotate(linear(x, w["k_rope"], b["k_rope_bias"]), torch.arange(8))
        keys.append(torch.cat((linear(latent, w["up_k"][h]), shared), -1))
        values.append(linear(latent, w["up_v"][h]))
    context = scaled_dot_product_attention(*(torch.stack(s, 1) for s in (queries, keys, values)), is_causal=True, scale=0.37)
    expected = linear(context.transpose(1, 2).flatten(2), w["o"].flatten(1), b["o_bias"])
    found = latent_attention(x, FactoredAttention(**w, **b, scale=0.37, rotary=rotation))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
