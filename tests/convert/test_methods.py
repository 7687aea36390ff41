"""Methods as pure functions of a record: what they keep, what they merge, what they may not drop."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.qk_norm import QKNorm
from attention.reference import grouped_attention
from convert.methods import GROUPED, load_grouped
from convert.methods.grouped import Draw
from convert.record import Attention


def record(
    heads: int = 8, groups: int = 4, norm: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Attention:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def key_norm(count: int) -> QKNorm:
        rows = 1 if norm == "shared" else count
        return QKNorm("rms", "all" if norm == "all" else "head", draw(rows, 6), draw(rows, 6), 1e-6)

    return Attention(
        q=draw(heads, 6, 10), k=draw(groups, 6, 10), v=draw(groups, 6, 10), o=draw(10, heads, 6), scale=0.4,
        q_bias=draw(heads, 6), k_bias=draw(groups, 6), v_bias=draw(groups, 6), o_bias=draw(10),
        q_norm=key_norm(heads) if norm else None, k_norm=key_norm(groups) if norm else None,
    )  # fmt: skip


def repeated(a: Attention, times: int) -> Attention:
    """The same function with every KV head `times` times over."""
    rows = {name: getattr(a, name).repeat_interleave(times, 0) for name in ("k", "v", "k_bias", "v_bias")}
    norm = a.k_norm
    if norm and norm.per_head_gains:
        norm = dataclasses.replace(norm, gain=norm.gain.repeat_interleave(times, 0), bias=norm.bias.repeat_interleave(times, 0))
    return dataclasses.replace(a, **rows, k_norm=norm)


def run(a: Attention) -> torch.Tensor:
    x = torch.randn(2, 9, 10, generator=torch.Generator().manual_seed(5)).to(a.q.dtype)
    return grouped_attention(x, **{field.name: getattr(a, field.name) for field in dataclasses.fields(a)})


def draw(seed: int = 0) -> Draw:
    return Draw(torch.Generator().manual_seed(seed), 0.02)


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
    merged = load_grouped(method).merge(many, groups, draw())
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


def test_mean_is_the_mean_of_adjacent_heads() -> None:
    a = record(groups=4, norm="head")
    merged = load_grouped("mean").merge(a, 2, draw())
    for name in ("k", "v", "k_bias", "v_bias"):
        rows = getattr(a, name)
        expected = torch.stack([(rows[0] + rows[1]) / 2, (rows[2] + rows[3]) / 2])
        assert torch.allclose(getattr(merged, name), expected, atol=1e-6), name
    assert torch.allclose(merged.k_norm.gain, a.k_norm.gain.unflatten(0, (2, 2)).mean(1))


def test_first_takes_the_first_head_of_each_group() -> None:
    a = record(groups=4, norm="all")
    merged = load_grouped("first").merge(a, 2, draw())
    for name in ("k", "v", "k_bias", "v_bias"):
        assert torch.equal(getattr(merged, name), getattr(a, name)[::2]), name
    assert torch.equal(merged.k_norm.gain, a.k_norm.gain[::2])


def test_random_keeps_nothing_and_is_seeded() -> None:
    a = record(groups=4, norm="head")
    once, again, other = (load_grouped("random").merge(a, 2, draw(seed)) for seed in (3, 3, 4))
    assert torch.equal(once.k, again.k)
    assert torch.equal(once.v, again.v)
    assert not torch.equal(once.k, other.k)
    assert not torch.equal(once.k, once.v)
    assert 0.01 < once.k.std() < 0.03
    assert once.k_bias.abs().sum() == once.v_bias.abs().sum() == 0
    assert torch.equal(once.k_norm.gain, torch.ones(2, 6))
    assert torch.equal(once.k_norm.bias, torch.zeros(2, 6))
    assert once.q is a.q


def test_random_gains_are_one_where_gain_minus_one_is_stored() -> None:
    a = record(groups=4, norm="head")
    a = dataclasses.replace(a, k_norm=dataclasses.replace(a.k_norm, gain_offset=1.0))
    assert load_grouped("random").merge(a, 2, draw()).k_norm.gain.abs().sum() == 0


@pytest.mark.parametrize("method", GROUPED)
@pytest.mark.parametrize("norm", [None, "shared", "head", "all"])
def test_every_method_gives_a_record_that_runs(method: str, norm: str | None) -> None:
    a = record(norm=norm)
    for groups in (1, 2):
        merged = load_grouped(method).merge(a, groups, draw())
        assert merged.num_kv_heads == groups
        assert merged.v.shape == (groups, 6, 10)
        assert merged.k.dtype == a.k.dtype
        assert torch.isfinite(run(merged)).all()


@pytest.mark.parametrize("method", GROUPED)
def test_the_registry_names_each_method_by_its_module(method: str) -> None:
    found = load_grouped(method)
    assert found.name == method
    assert found.summary
    assert found.source.startswith("arXiv:")
