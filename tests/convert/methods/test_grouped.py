"""Merging KV heads, by any method: copies merge into themselves; the published `mean`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import merge, record, repeated
from records import inputs, run

from convert.methods import GROUPED, load_grouped


@pytest.mark.parametrize("norm", [None, "shared", "head", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=6, deadline=None)
@given(groups=st.sampled_from([1, 2, 4]), times=st.integers(2, 7), seed=st.integers(0, 100))
def test_equal_heads_merge_into_themselves_bit_for_bit(
    dtype: torch.dtype, norm: str | None, groups: int, times: int, seed: int
) -> None:
    few = record(heads=4 * times, groups=groups, norm=norm, seed=seed, dtype=dtype)
    many = repeated(few, times)
    merged = merge("mean", many, groups)
    for name in ("k", "v", "k_bias", "v_bias", "q", "o", "q_bias", "o_bias"):
        assert torch.equal(getattr(merged, name).to(dtype), getattr(few, name)), name
    if norm:
        assert torch.equal(merged.k_norm.gain.to(dtype), few.k_norm.gain)
        assert torch.equal(merged.k_norm.bias.to(dtype), few.k_norm.bias)
        assert merged.q_norm is many.q_norm


@pytest.mark.parametrize("method", GROUPED)
@pytest.mark.parametrize("norm", [None, "shared", "head", "all"])
def test_every_method_gives_a_record_that_runs(method: str, norm: str | None) -> None:
    sinks = torch.arange(8).bfloat16()
    found = load_grouped(method)
    assert found.name == method
    assert found.summary
    assert found.source.startswith("arXiv:") or method == "aligned"
    for groups in (1, 2):
        merged = merge(method, replace(record(norm=norm), sinks=sinks), groups)
        assert merged.num_kv_heads == groups
        assert merged.v.shape == (groups, 6, 10)
        assert torch.isfinite(run(replace(merged, sinks=None), inputs(10))).all()
        assert merged.sinks is sinks


def test_mean_is_the_mean_of_adjacent_heads() -> None:
    a = record(groups=4, norm="head")
    mean = merge("mean", a, 2)
    for name in ("k", "v", "k_bias", "v_bias"):
        rows = getattr(a, name)
        assert torch.allclose(getattr(mean, name), rows.unflatten(0, (2, 2)).mean(1), atol=1e-6), name
    assert torch.allclose(mean.k_norm.gain, a.k_norm.gain.unflatten(0, (2, 2)).mean(1))  # type: ignore[union-attr]
