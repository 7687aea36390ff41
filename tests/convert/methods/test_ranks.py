"""How ranks are shared out among layers: known answers, and what must hold of all costs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.methods.ranks import interpolated, measured_ranks, shared_out
from convert.planning.budget import layer_ranks

STEPS = (2, 4, 6, 8)


def test_rank_goes_where_it_saves_most() -> None:
    costs = [[9.0, 4.0, 2.0, 1.0], [3.0, 2.5, 2.2, 2.1], [0.0, 0.0, 0.0, 0.0]]
    assert shared_out(costs, STEPS, 12) == (8, 2, 2)
    assert shared_out(costs, STEPS, 6) == (2, 2, 2)
    assert shared_out(costs, STEPS, 100) == (8, 8, 8)


def test_a_flat_step_before_a_steep_one_is_no_obstacle() -> None:
    assert shared_out([[9.0, 9.0, 1.0, 1.0], [5.0, 4.0, 3.5, 3.2]], STEPS, 8) == (6, 2)


convex = st.lists(st.floats(0, 10), min_size=3, max_size=3).map(
    lambda falls: [sum(sorted(falls, reverse=True)[i:]) for i in range(4)]
)


@settings(deadline=None)
@given(costs=st.lists(convex, min_size=1, max_size=4), spare=st.integers(0, 12))
def test_where_costs_fall_ever_less_no_choice_is_better(costs: list[list[float]], spare: int) -> None:
    total = 2 * len(costs) + 2 * spare
    found = shared_out(costs, STEPS, total)

    def cost(ranks: tuple[int, ...]) -> float:
        return sum(row[STEPS.index(rank)] for row, rank in zip(costs, ranks, strict=True))

    assert sum(found) <= total
    best = min(cost(ranks) for ranks in product(STEPS, repeat=len(costs)) if sum(ranks) <= total)
    assert cost(found) == pytest.approx(best, abs=1e-9)


@settings(deadline=None)
@given(costs=st.lists(st.lists(st.floats(0, 10), min_size=4, max_size=4), min_size=1, max_size=5), spare=st.integers(0, 30))
def test_ranks_never_sum_to_more_than_allowed(costs: list[list[float]], spare: int) -> None:
    found = shared_out(costs, STEPS, 2 * len(costs) + spare)
    assert set(found) <= set(STEPS)
    assert sum(found) <= 2 * len(costs) + spare


def test_costs_between_those_measured_fall_by_equal_shares() -> None:
    assert interpolated([2, 6], [16.0, 1.0], [2, 3, 4, 6]) == pytest.approx([16, 8, 4, 1])
    assert interpolated([2, 6, 8], [4.0, 1.0, 2.0], [2, 6, 8]) == pytest.approx([4, 1, 1]), "more rank never costs more"
    assert interpolated([4], [3.0], [4]) == pytest.approx([3])
    assert interpolated([2, 4], [1.0, 0.0], [2, 3, 4])[-1] == pytest.approx(0, abs=1e-200)


@settings(deadline=None)
@given(mean=st.integers(1, 600), full=st.integers(1, 2000))
def test_every_layer_can_have_the_least_rank_and_none_exceeds_full_size(mean: int, full: int) -> None:
    ranks = layer_ranks(mean, max(mean, full))
    assert 1 <= ranks[0] <= mean
    assert ranks[-1] <= max(mean, full)
    assert list(ranks) == sorted(set(ranks))
    measured = measured_ranks(ranks)
    assert (measured[0], measured[-1]) == (ranks[0], ranks[-1])
    assert set(measured) <= set(ranks)
    assert len(measured) <= 6


def test_ranks_are_multiples_of_what_the_cuda_kernel_takes_and_full_size() -> None:
    assert all(rank % 16 == 0 for rank in layer_ranks(512, 4096))
    assert layer_ranks(96, 300) == tuple(range(16, 241, 16))
    assert layer_ranks(100, 100)[-1] == 100
    assert layer_ranks(48, 75) == (*range(12, 73, 4), 75)
