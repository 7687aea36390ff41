"""Merging KV heads, by any method: copies merge into themselves, and the order of heads does not matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import loss, merge, record, repeated, run, with_rope

from convert.methods import GROUPED
from convert.methods.grouped import reordered


@pytest.mark.parametrize("norm", [None, "shared", "head", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["mean", "first"])
@settings(max_examples=15, deadline=None)
@given(groups=st.sampled_from([1, 2, 4]), times=st.integers(2, 7), seed=st.integers(0, 100))
def test_equal_heads_merge_into_themselves_bit_for_bit(
    method: str, dtype: torch.dtype, norm: str | None, groups: int, times: int, seed: int
) -> None:
    few = record(heads=4 * times, groups=groups, norm=norm, seed=seed, dtype=dtype)
    many = repeated(few, times)
    merged = merge(method, many, groups)
    for name in ("k", "v", "k_bias", "v_bias", "q", "o", "q_bias", "o_bias"):
        assert torch.equal(getattr(merged, name).to(dtype), getattr(few, name)), name
    if norm:
        assert torch.equal(merged.k_norm.gain.to(dtype), few.k_norm.gain)
        assert torch.equal(merged.k_norm.bias.to(dtype), few.k_norm.bias)
        assert merged.q_norm is many.q_norm


def test_repeating_heads_does_not_change_the_function() -> None:
    for norm in (None, "shared", "head", "all"):
        few = record(heads=8, groups=2, norm=norm, dtype=torch.float64)
        assert torch.allclose(run(few), run(repeated(few, 4)), rtol=1e-12)


@pytest.mark.parametrize("method", GROUPED)
@pytest.mark.parametrize("norm", [None, "shared", "head", "all"])
def test_every_method_gives_a_record_that_runs(method: str, norm: str | None) -> None:
    a = record(norm=norm)
    for groups in (1, 2):
        merged = merge(method, a, groups)
        assert merged.num_kv_heads == groups
        assert merged.v.shape == (groups, 6, 10)
        assert merged.k.dtype == a.k.dtype
        assert torch.isfinite(run(merged)).all()


@pytest.mark.parametrize("method", GROUPED)
def test_sinks_of_merged_heads_stay(method: str) -> None:
    sinks = torch.arange(8).bfloat16()
    assert merge(method, replace(record(), sinks=sinks), 2).sinks is sinks


def test_sinks_follow_their_query_heads() -> None:
    a = replace(with_rope(record(heads=8, groups=4)), sinks=torch.linspace(-2, 2, 8))
    moved = reordered(a, [2, 0, 3, 1])
    assert torch.equal(moved.sinks, a.sinks[[4, 5, 0, 1, 6, 7, 2, 3]])
    assert loss(a, moved) < 1e-6
    assert loss(a, replace(moved, sinks=a.sinks)) > 1e-2


@settings(max_examples=15, deadline=None)
@given(norm=st.sampled_from([None, "shared", "head", "all"]), share=st.integers(1, 3), order=st.permutations(range(4)))
def test_heads_in_another_order_are_the_same_function(norm: str | None, share: int, order: list[int]) -> None:
    a = with_rope(record(heads=4 * share, groups=4, norm=norm))
    moved = reordered(a, order)
    assert loss(a, moved) < 1e-6
    assert torch.equal(moved.k, a.k[order])
    assert torch.allclose(run(reordered(a.on_projected_inputs(), order)), run(a), rtol=1e-4, atol=1e-4)
    back = reordered(moved, [order.index(head) for head in range(4)])
    assert all(torch.equal(getattr(a, name), getattr(back, name)) for name in ("q", "k", "v", "o", "q_bias", "v_bias"))
