"""Making a latent, by any method: exact at full size, better with more, finite whatever comes."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from records import (
    PAIRINGS,
    blocks_of,
    energies,
    every_pair,
    factor,
    factored,
    full_rank,
    inputs,
    loss,
    measured,
    measured_behind,
    random,
    record,
    run,
    turned_copies,
)

from attention.forward import attention_output
from attention.record import Attention
from attention.rope import Pairing, Rotary
from convert.methods import LATENT, load_latent
from convert.methods.frequencies import pairs_by_loss, pairs_by_stride
from convert.methods.latent import Allocation, sized
from convert.methods.statistics import Statistics
from convert.methods.weighted import RopeKeys


@pytest.mark.parametrize("method", LATENT)
@settings(max_examples=20, deadline=None)
@given(
    groups=st.integers(1, 4), share=st.integers(1, 3), pairs=st.integers(0, 4), nope=st.integers(0, 3),
    width=st.integers(3, 40), pairing=st.sampled_from(PAIRINGS), biased=st.booleans(),
    attention_factor=st.sampled_from([1.0, 1.25]), gains=st.none() | st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@example(4, 1, 4, 0, 8, "half", True, 1.25, None, 0)  # MHA, E small
@example(1, 4, 2, 3, 40, "interleaved", True, 1.25, True, 1)  # MQA
@example(3, 2, 0, 3, 20, "half", True, 1.0, None, 2)  # no positions
def test_full_size_is_the_same_function(
    method: str, groups: int, share: int, pairs: int, nope: int, width: int, pairing: Pairing, biased: bool,
    attention_factor: float, gains: bool | None, seed: int,
) -> None:  # fmt: skip
    """On text, and without: with the gains of a norm, or without a norm. Without positions the latent alone is it."""
    nope = nope if pairs else 2 * nope + 1
    a = record(groups, share, pairs, nope, width, pairing, biased, attention_factor, seed)
    norm = random(2, width, seed=seed + 1) if gains else ()
    known = measured(inputs(width)) if gains is None else Statistics.assumed(width, *norm)
    kept = every_pair(a) if pairs else (0, 1, 1)
    rank = full_rank(a, kept) if pairs else min(width, 2 * groups * nope)
    elsewhere = None if pairs else Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
    found = load_latent(method).factor(a, Allocation(rank, kept, rotary=elsewhere), known)
    assert found.down.shape == (rank, width)
    assert found.k_rope.shape == (2 * len(kept), width)
    assert found.k_rope.any() == bool(pairs)
    assert loss(a, found) < 1e-5


@pytest.mark.parametrize("method", LATENT)
@settings(max_examples=10, deadline=None)
@given(
    groups=st.integers(1, 3), share=st.integers(1, 2), pairs=st.integers(0, 3), nope=st.integers(1, 3),
    form=st.sampled_from([("shared", None), ("head", None), ("all", 0.9), ("layer", None), (None, 0.9)]), text=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_full_size_behind_projections_is_the_same_function(
    method: str, groups: int, share: int, pairs: int, nope: int, form: tuple[str | None, float | None], text: bool, seed: int
) -> None:
    norm, clip = form
    a = record(groups, share, pairs, nope, norm=norm, seed=seed)
    behind = a.on_projected_inputs(clip)
    known = measured_behind(behind.projections, inputs(20)) if text else Statistics.assumed(20).behind(behind.projections)
    kept, dim = every_pair(a) if pairs else (), 2 * pairs + nope
    rotary = None if pairs else Rotary(torch.ones(2, dtype=torch.float64), "half")
    size = Allocation(2 * groups * dim - 2 * len(kept), kept, rotary=rotary)
    found = load_latent(method).factor(behind, size, known)
    assert found.projections is behind.projections
    assert loss(behind, found) < 1e-4


@pytest.mark.parametrize("method", LATENT)
def test_the_order_of_frequencies_is_that_of_size_and_the_list_of_longrope_follows(method: str) -> None:
    a = record()
    a = dataclasses.replace(a, rotary=dataclasses.replace(a.rotary, long_frequencies=a.rotary.frequencies / 3, long_beyond=10))
    kept = every_pair(a)
    found = factor(method, a, Allocation(full_rank(a, kept), kept))
    assert torch.equal(found.rotary.frequencies, a.rotary.frequencies[list(kept)])
    assert (found.rotary.pairing, found.rotary.attention_factor, found.rotary.long_beyond) == ("interleaved", 1.0, 10)
    short, long = inputs(20)[:, :9], inputs(20)
    assert loss(a, found, short) < 1e-5
    assert loss(a, found, long) < 1e-5
    lacking = dataclasses.replace(found, rotary=dataclasses.replace(found.rotary, long_frequencies=None))
    assert loss(a, lacking, long) > 1e-2


def test_what_no_query_reads_takes_no_rank() -> None:
    """`weighted` weighs keys by queries: of two nope dims of each head, none is lost but those that nothing reads."""
    a = record(groups=2, share=2, pairs=2, nope=4, width=40)
    q, q_bias = a.q.clone(), a.q_bias.clone()
    q[:, 4:6], q_bias[:, 4:6] = 0, 0
    a, kept = dataclasses.replace(a, q=q, q_bias=q_bias), every_pair(a)
    rank = full_rank(a, kept) - 2 * 2
    assert loss(a, load_latent("weighted").factor(a, Allocation(rank, kept), measured(inputs(40)))) < 1e-3
    assert loss(a, load_latent("svd").factor(a, Allocation(rank, kept), measured(inputs(40)))) > 1e-2


@pytest.mark.parametrize("method", ["svd", "weighted"])
@settings(max_examples=10, deadline=None)
@given(
    groups=st.integers(2, 4), share=st.integers(1, 2), pairs=st.integers(1, 3), pairing=st.sampled_from(PAIRINGS),
    attention_factor=st.sampled_from([1.0, 1.25]), seed=st.integers(0, 99),
)  # fmt: skip
def test_heads_that_are_turned_copies_need_one_component_each(
    method: str, groups: int, share: int, pairs: int, pairing: Pairing, attention_factor: float, seed: int
) -> None:
    a = turned_copies(record(groups, share, pairs, 0, 30, pairing, True, attention_factor, seed))
    kept = tuple(range(pairs))
    assert pairs_by_loss([energies(a)], pairs) == kept
    assert loss(a, factor(method, a, Allocation(full_rank(a, kept), kept))) < 1e-5


@pytest.mark.parametrize("method", LATENT)
def test_a_true_rank_is_found_and_less_than_that_loses(method: str) -> None:
    a, kept = record(groups=4, nope=2, width=30), every_pair(record(groups=4, nope=2))
    shared = random(5, 30, seed=4) * 0.3  # nope keys and values all come from five numbers
    k = torch.cat((a.k[:, :6], torch.einsum("gdr,re->gde", random(4, 2, 5, seed=5), shared)), 1)
    a = dataclasses.replace(a, k=k, v=torch.einsum("gdr,re->gde", random(4, 8, 5, seed=6), shared))
    found = {rank: loss(a, factor(method, a, Allocation(rank, kept))) for rank in (1, 3, 4, 5, 6)}
    assert found[5] < 1e-5
    assert found[6] < 1e-5
    assert found[4] > 1e-3
    assert found[1] > found[3] > found[4]


@pytest.mark.parametrize("method", LATENT)
def test_less_is_lost_with_more_of_either(method: str) -> None:
    found = load_latent(method)
    assert found.name == method
    assert found.summary
    assert (found.measure is None) == found.folds
    a = record(groups=4, pairs=4, width=60)
    by_rank = [loss(a, factor(method, a, Allocation(rank, every_pair(a)))) for rank in (4, 12, 20, 28, 32)]
    by_rope = [loss(a, factor(method, a, Allocation(60, pairs_by_stride(dims, 8)))) for dims in (8, 16, 24, 32)]
    for losses_seen in (by_rank, by_rope):
        assert losses_seen == sorted(losses_seen, reverse=True)
        assert losses_seen[0] > 0.05
        assert losses_seen[-1] < 1e-5


def one_key(pairs: int) -> Attention:
    """Four heads with the same keys and values."""
    one = record(4, 1, pairs=pairs, nope=6, width=40, pairing="interleaved")
    same = {name: getattr(one, name)[:1].expand_as(getattr(one, name)) for name in ("k", "v", "k_bias", "v_bias")}
    return dataclasses.replace(one, **same)


def unrotated(whole: Attention, pairs: tuple[int, ...], share: torch.Tensor) -> Attention:
    """A source in which only `pairs` go on rotating, and KV head g has `share [G, P/2]` of the keys of the others."""
    first = torch.cat([torch.tensor([2 * pair, 2 * pair + 1]) for pair in pairs])
    others = [pair for pair in range(len(whole.rotary.frequencies)) if pair not in pairs]
    keys, _ = whole.rotary.to_complex(whole.k)
    scaled = whole.rotary.from_complex(keys * share.to(keys.dtype)[..., None])
    last = torch.cat([torch.tensor([2 * pair, 2 * pair + 1]) for pair in others])
    nope = slice(whole.rotary.dims, None)
    # A bias of keys that do not rotate cancels in the softmax.
    return dataclasses.replace(
        whole,
        q=torch.cat((whole.q[:, first], whole.q[:, last], whole.q[:, nope]), 1),
        q_bias=torch.cat((whole.q_bias[:, first], whole.q_bias[:, last], whole.q_bias[:, nope]), 1),
        k=torch.cat((whole.k[:, first], scaled[:, last], whole.k[:, nope]), 1),
        k_bias=torch.cat((whole.k_bias[:, first], torch.zeros_like(whole.k_bias[:, len(first) :])), 1),
        rotary=whole.rotary.select(list(pairs), "interleaved"),
    )


@pytest.mark.parametrize("pairs", [(1,), (0, 2)], ids=str)
@pytest.mark.parametrize("method", LATENT)
def test_fewer_rotary_dims_lose_what_not_rotating_loses_and_nothing_else(method: str, pairs: tuple[int, ...]) -> None:
    """At full rank: nope dims, those that do not rotate any more, and values."""
    a, x = one_key(3), inputs(40)
    rank = 6 + 12 + 2 * (3 - len(pairs))
    share = torch.ones(4, 3, dtype=torch.complex128)
    if method == "weighted":  # the mean over the distances at which a head attends
        share = RopeKeys.of(a, measured(x)).phase
        assert (share.abs() < 0.9).any(), "there is something to be weighed"
    expected = unrotated(a, pairs, share)
    lost = [loss(expected, factor(method, a, Allocation(less, pairs)), x) for less in (rank // 4, rank // 2, rank - 1, rank)]
    assert loss(a, expected, x) > 1e-2, "not rotating loses something"
    assert lost == sorted(lost, reverse=True)
    assert lost[-2] > 1e-3
    assert lost[-1] < 1e-5


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize("width", [8, 40])
def test_a_constant_input_has_a_singular_moment_and_full_size_stays_exact(method: str, width: int) -> None:
    a, constant = record(groups=2, width=width), inputs(width)[:1, :1].expand(2, 24, width)
    kept = every_pair(a)
    found = factor(method, a, Allocation(full_rank(a, kept), kept), constant)
    assert loss(a, found) < 1e-4
    few = factor(method, a, Allocation(3, (0, 1, 2)), constant)
    assert torch.isfinite(run(few, inputs(width))).all()


DEAD: dict[str, tuple[str, Any]] = {
    "key": ("k", 1), "value": ("v", 0), "query": ("q", 0), "pair": ("k", (slice(None), slice(None, None, 3))),
    "keys": ("k", slice(None)), "values": ("v", slice(None)),
}  # fmt: skip


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize("what", DEAD)
def test_dead_heads_are_finite_and_exact_at_full_size(method: str, what: str) -> None:
    a, (name, place) = record(groups=3, width=40, biased=False), DEAD[what]
    getattr(a, name)[place] = 0
    kept, few = every_pair(a), factor(method, a, Allocation(18, (0, 1, 2)))
    assert torch.isfinite(run(few, inputs(40))).all()
    if what == "values":
        assert run(few, inputs(40)).abs().max() < 1e-5
    else:
        assert loss(a, factor(method, a, Allocation(full_rank(a, kept), kept))) < 1e-5
    if what == "keys":  # all 18 values fit
        assert loss(a, few) < 1e-5
    assert torch.isfinite(energies(a)).all()
    assert len(pairs_by_loss([energies(a)], 3)) == 3


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_extreme_scales_are_as_good_as_any(method: str, scale: float) -> None:
    a = record(groups=2, width=30, biased=False)
    extreme = dataclasses.replace(a, k=a.k * scale, v=a.v * scale, q=a.q / scale, o=a.o / scale)
    size = Allocation(8, (0, 1, 2))
    assert loss(extreme, factor(method, extreme, size)) == pytest.approx(loss(a, factor(method, a, size)), rel=1e-2)


@pytest.mark.parametrize("wanted", [0.25, 2.0**9])
def test_a_latent_has_the_size_that_is_wanted_without_rounding(wanted: float) -> None:
    a, x = factored(biased=False), inputs(20)
    rows = x.flatten(0, 1)
    found = sized(a, rows.double().T @ rows.double() / len(rows), wanted)
    assert torch.equal(attention_output(found, blocks_of(x)), attention_output(a, blocks_of(x)))
    size = float((rows @ found.down.T).square().mean().sqrt())
    assert wanted / 2 < size <= wanted
    a.down.zero_()
    assert not sized(a, torch.eye(20).double(), wanted).down.any()
