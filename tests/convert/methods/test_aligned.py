"""`aligned`: what commutes with RoPE merges without loss, and little is decomposed."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import disguised, merge, record, repeated, with_rope
from records import inputs, loss, measured, run

from attention.record import Attention
from convert.methods import load_latent
from convert.methods.latent import Allocation
from convert.methods.statistics import Statistics
from convert.methods.weighted import _values


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@settings(max_examples=6, deadline=None)
@given(
    groups=st.sampled_from([1, 2]), times=st.sampled_from([2, 4]), pairs=st.integers(1, 3), seed=st.integers(0, 50),
    text=st.booleans(),
)  # fmt: skip
def test_heads_that_differ_by_what_commutes_with_rope_merge_without_loss(
    pairing: str, groups: int, times: int, pairs: int, seed: int, text: bool
) -> None:
    few = with_rope(record(heads=4 * groups, groups=groups, seed=seed), pairs, pairing)
    many = disguised(few, times, seed)
    assert loss(few, many) < 1e-9
    known = measured(inputs(10)) if text else None
    assert loss(many, merge("aligned", many, groups, statistics=known)) < 1e-4
    assert loss(many, merge("mean", many, groups)) > 1e-2


@pytest.mark.parametrize("norm", [None, "shared", "head", "all"])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_equal_heads_are_lossless_whatever_turns(norm: str | None, factor: float) -> None:
    for pairs in (0, 1, 3):
        few = record(heads=8, groups=2, norm=norm)
        few = with_rope(few, pairs, factor=factor) if pairs else few
        many = repeated(few, 4)
        merged = merge("aligned", many, 2)
        assert loss(many, merged) < 1e-4
        assert merged.k.shape == (2, 6, 10)
        assert merged.o.shape == many.o.shape


def test_keys_of_opposite_sign_meet_where_norms_forbid_more() -> None:
    few = with_rope(record(heads=4, groups=2, norm="shared"))
    norms = {"q_norm": dataclasses.replace(few.q_norm, bias=None), "k_norm": dataclasses.replace(few.k_norm, bias=None)}
    many = repeated(dataclasses.replace(few, **norms), 2)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    flipped = dataclasses.replace(
        many, k=many.k * sign[..., None], k_bias=many.k_bias * sign, q=many.q * sign[..., None], q_bias=many.q_bias * sign
    )
    assert loss(many, flipped) < 1e-6
    assert loss(many, merge("aligned", flipped, 2)) < 1e-5


@pytest.mark.parametrize("norm", [None, "shared", "all"])
def test_aligned_loses_less_than_mean(norm: str | None) -> None:
    for seed in range(2):
        a = with_rope(record(heads=8, groups=8, norm=norm, seed=seed))
        aligned, mean = (loss(a, merge(name, a, 2)) for name in ("aligned", "mean"))
        assert aligned < mean


@pytest.mark.parametrize("what", ["k", "v", "q", "o"])
def test_heads_of_zeros_stay_finite(what: str) -> None:
    a = with_rope(record(heads=8, groups=4))
    tensor = getattr(a, what).clone()
    (tensor[:, :4] if what == "o" else tensor[:2]).zero_()
    merged = merge("aligned", dataclasses.replace(a, **{what: tensor}), 2)
    assert torch.isfinite(run(merged, inputs(10))).all()


@pytest.mark.parametrize("norm", ["shared", "all"])
def test_gains_of_zeros_stay_finite(norm: str) -> None:
    a = with_rope(record(heads=8, groups=4, norm=norm))
    silent = dataclasses.replace(a.k_norm, gain=torch.zeros_like(a.k_norm.gain))
    merged = merge("aligned", dataclasses.replace(a, k_norm=silent), 2)
    assert torch.isfinite(merged.k).all()


def test_aligned_looks_at_the_text() -> None:
    a = with_rope(record(heads=8, groups=8))
    scales = torch.logspace(0, -2, 10), torch.logspace(-2, 0, 10)
    texts = [inputs(10, tokens=64) * scale for scale in scales]
    own, other = (merge("aligned", a, 2, statistics=measured(x)) for x in texts)
    assert loss(a, own, texts[0]) < 0.8 * loss(a, other, texts[0])


def test_what_is_merged_is_as_large_as_heads_were() -> None:
    a = with_rope(record(heads=8, groups=4), pairs=1)
    a = dataclasses.replace(a, o=a.o / 50, q=a.q * 50)
    merged = merge("aligned", a, 2)
    for name in ("q", "k", "v", "o"):  # one learning rate has to suit them all
        before, after = (getattr(one, name).square().mean().sqrt() for one in (a, merged))
        assert 0.4 * before < after < 2.5 * before, name


def test_heads_that_nobody_reads_cost_the_others_nothing() -> None:
    a = record(heads=4, groups=4)
    alive = torch.tensor([1.0, 0.0, 1.0, 0.0])
    a = dataclasses.replace(a, o=a.o * alive[:, None], q=a.q * alive[:, None, None], q_bias=a.q_bias * alive[:, None])
    merged = merge("aligned", a, 2)
    assert loss(a, merged) < 1e-4


def lost(way: str, a: Attention, copies: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What is lost of W_O W_V of each head `[H]`, and by `aligned` of W_Qᵀ W_K, where one head copies, or none does."""
    matching, seen = torch.zeros(4, dtype=torch.float64), Statistics.assumed(10)
    if copies is not None:
        matching[copies] = 1
    seen = dataclasses.replace(seen, attended=dataclasses.replace(seen.attended, matching=matching))
    if way == "aligned":
        after = merge(way, a, 2, seen)
        values, logits = after.v.repeat_interleave(2, 0), after.q.mT @ after.k.repeat_interleave(2, 0) - a.q.mT @ a.k
    else:
        after = load_latent(way).factor(a, Allocation(6, (0,)), seen)
        values, logits = after.up_v @ after.down, torch.ones(4, 1, 1)
    outputs = after.o.permute(1, 0, 2) @ values - a.o.permute(1, 0, 2) @ a.v
    return outputs.norm(dim=(1, 2)), logits.norm(dim=(1, 2))


def test_heads_that_copy_lose_less() -> None:
    a = with_rope(record(heads=4, groups=4), pairs=1)
    (values, logits), (of_copying, logits_of_copying) = lost("aligned", a, None), lost("aligned", a, 1)
    assert of_copying[1] < 0.8 * values[1]
    assert logits_of_copying[1] < 0.8 * logits[1]
    assert lost("weighted", a, 1)[0][1] < 0.8 * lost("weighted", a, None)[0][1]


def test_heads_whose_values_a_latent_loses_count_more() -> None:
    v, o = torch.tensor([3.0, 1.0, 2.0])[:, None, None] * torch.eye(3)[:, None], torch.eye(3)[:, :, None]
    a = dataclasses.replace(record(heads=3, groups=3), q=torch.ones(3, 1, 3), v=v, o=o)
    attended = dataclasses.replace(Statistics.assumed(3).attended, matching=torch.tensor([1, 0.5, 0], dtype=torch.float64))
    eye = torch.eye(3, dtype=torch.float64)
    values, unweigh = _values(a, attended, eye, 0 * eye, 1)  # of rank 1: the first ones are kept, the others lost
    torch.testing.assert_close(values.square(), (v.double().square() * torch.tensor([1.0, 26.0, 1.0])[:, None, None]))
    torch.testing.assert_close(unweigh @ values, v.double())
