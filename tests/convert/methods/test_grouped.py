"""Merging KV heads, by any method: copies merge into themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import merge, record, repeated, run

from convert.methods import GROUPED


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
