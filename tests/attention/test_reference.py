"""The oracle itself, against torch: grouped and latent attention. Families are held against it elsewhere."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import factored, inputs, record, run
from torch.nn.functional import linear, scaled_dot_product_attention

from attention.record import Record

WIDTH = 12


def projected(a: Record, name: str, x: torch.Tensor) -> torch.Tensor:
    """`[B, heads, T, D]` of `x [B, T, E]`."""
    weight, bias = getattr(a, name).double(), getattr(a, f"{name}_bias", None)
    states = linear(x, weight.flatten(0, 1), None if bias is None else bias.double().flatten())
    return states.unflatten(-1, weight.shape[:2]).transpose(1, 2)


def put_out(a: Record, context: torch.Tensor) -> torch.Tensor:
    """`[B, T, E]` of `context [B, H, T, D]`."""
    return linear(context.transpose(1, 2).flatten(2), a.o.double().flatten(1), None if a.o_bias is None else a.o_bias.double())


@settings(deadline=None, max_examples=40)
@given(
    groups=st.integers(1, 4), share=st.integers(1, 4), dim=st.integers(1, 9), length=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_attention_is_that_of_torch(groups: int, share: int, dim: int, length: int, seed: int) -> None:
    a, x = record(groups, share, 0, dim, WIDTH, seed=seed), inputs(WIDTH, length, seed).double()
    states = (projected(a, name, x) for name in "qkv")
    context = scaled_dot_product_attention(*states, is_causal=True, scale=a.scale, enable_gqa=True)
    torch.testing.assert_close(run(a, x), put_out(a, context), rtol=1e-9, atol=1e-9)


def test_a_sink_is_one_more_token_of_no_value() -> None:
    """Its key is such that every query of a head meets the head's sink; torch has it as the first of the tokens."""
    a, x = record(2, 2, 0, 6, WIDTH, biased=False, sinks=True), inputs(WIDTH, 7).double()
    sinks = a.sinks.double()[:, None, None].expand(2, 4, 7, 1)
    meets = torch.cat((projected(a, "q", x), sinks / a.scale), -1)
    keys = torch.nn.functional.pad(projected(a, "k", x), (0, 1)).repeat_interleave(2, 1)
    sink = torch.nn.functional.one_hot(torch.tensor(6), 7).double().expand(2, 4, 1, 7)
    values = torch.nn.functional.pad(projected(a, "v", x).repeat_interleave(2, 1), (0, 0, 1, 0))
    seen = torch.ones(7, 8, dtype=torch.bool).tril(1)
    context = scaled_dot_product_attention(meets, torch.cat((sink, keys), 2), values, seen, scale=a.scale)
    found = run(a, x)
    torch.testing.assert_close(found, put_out(a, context), rtol=1e-9, atol=1e-9)
    without = run(dataclasses.replace(a, sinks=None), x)
    assert (found - without).norm() > 0.1 * without.norm()
    far_off = run(dataclasses.replace(a, sinks=torch.full_like(a.sinks, -1e3)), x)
    torch.testing.assert_close(far_off, without, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["head", "after"])
def test_queries_and_keys_are_normalised_on_the_right_side_of_the_rotation(norm: str) -> None:
    a, x = record(2, 2, 3, 0, WIDTH, biased=False, norm=norm), inputs(WIDTH, 7).double()

    def placed(name: str, normalise: Any) -> torch.Tensor:
        states, positions = projected(a, name, x), torch.arange(7)
        if normalise.form.after_rotary:
            return normalise(a.rotary.rotation(positions, states.dtype)(states))
        return a.rotary.rotation(positions, states.dtype)(normalise(states))

    states = placed("q", a.q_norm), placed("k", a.k_norm), projected(a, "v", x)
    context, found = scaled_dot_product_attention(*states, is_causal=True, scale=a.scale, enable_gqa=True), run(a, x)
    torch.testing.assert_close(found, put_out(a, context), rtol=1e-9, atol=1e-9)
    other = dataclasses.replace(a.q_norm, form=dataclasses.replace(a.q_norm.form, after_rotary=norm != "after"))
    assert not torch.allclose(found, run(dataclasses.replace(a, q_norm=other), x))


@settings(deadline=None, max_examples=40)
@given(heads=st.integers(1, 4), dim=st.integers(1, 5), pairs=st.integers(1, 4), rank=st.integers(1, 9), seed=st.integers(0, 99))
def test_latent_attention_is_that_of_torch_on_expanded_heads(heads: int, dim: int, pairs: int, rank: int, seed: int) -> None:
    a, x = factored(heads, dim, pairs, rank, WIDTH, seed=seed), inputs(WIDTH, 8, seed).double()
    latent, positions = linear(x, a.down.double()), torch.arange(8)
    shared = linear(x, a.k_rope.double(), None if a.k_rope_bias is None else a.k_rope_bias.double())[:, None]
    ropes = (
        a.rotary.rotation(positions, states.dtype)(states)
        for states in (projected(a, "q_rope", x), shared.expand(-1, heads, -1, -1))
    )
    nopes = projected(a, "q_nope", x), projected(a, "up_k", latent)
    queries, keys = (torch.cat(parts, -1) for parts in zip(nopes, ropes, strict=True))
    context = scaled_dot_product_attention(queries, keys, projected(a, "up_v", latent), is_causal=True, scale=a.scale)
    torch.testing.assert_close(run(a, x), put_out(a, context), rtol=1e-9, atol=1e-9)
