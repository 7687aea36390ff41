"""How a budget is split, and which folds of frequencies fit: known answers, and what must hold of every budget."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.errors import Refusal
from convert.methods.frequencies import pairs_by_stride
from convert.planning.budget import check_fold, default_fold, split_budget

# ---- folding ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(pairs=st.integers(1, 64), kept=st.integers(1, 300))
def test_the_default_fold_is_the_smallest_that_deals_out_evenly(pairs: int, kept: int) -> None:
    rotary_dim, rope_dim = 2 * pairs, 2 * kept
    even = [f for f in range(1, rotary_dim + 1) if f * rope_dim % rotary_dim == 0]
    fold = default_fold(rope_dim, rotary_dim)
    assert fold == even[0]
    choices = [f for f in even if f <= pairs and pairs % f == 0]
    assert choices, "no number of frequencies is without a fold"
    for f in range(-1, pairs + 2):
        if f in choices:
            check_fold(f, rope_dim, rotary_dim)
            counts = [[pair // f for pair in pairs_by_stride(rope_dim, rotary_dim)].count(band) for band in range(pairs // f)]
            assert len(set(counts)) == 1, "every band has as many rope components"
        else:
            with pytest.raises(Refusal):
                check_fold(f, rope_dim, rotary_dim)


@pytest.mark.parametrize(
    ("fold", "rope_dim", "message"),
    [
        (3, 16, "cannot fold 16 frequencies by 3 for 16 rotary dims: the fold must divide 16, and fold × 16 must be a "
                "multiple of 32 (choose 2, 4, 8, 16)"),
        (1, 8, "(choose 4, 8, 16)"),
        (0, 64, "cannot fold 16 frequencies by 0 for 64 rotary dims"),
        (-2, 64, "(choose 1, 2, 4, 8, 16)"),
        (32, 2, "(choose 16)"),
    ],
)  # fmt: skip
def test_a_fold_that_does_not_fit_is_told_which_do(fold: int, rope_dim: int, message: str) -> None:
    with pytest.raises(Refusal, match=re.escape(message)):
        check_fold(fold, rope_dim, 32)


# ---- budgets ---------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(
    values=st.integers(0, 3000), pairs=st.integers(1, 64), groups=st.integers(1, 16), nope=st.integers(0, 8),
    width=st.integers(1, 2000), reserved=st.integers(1, 2),
)  # fmt: skip
def test_a_budget_is_kept_and_nothing_of_it_wasted(
    values: int, pairs: int, groups: int, nope: int, width: int, reserved: int
) -> None:
    dim = 2 * pairs + nope

    def full_rank(rope_dim: int) -> int:
        return min(width, 2 * groups * dim - rope_dim) + reserved

    least = reserved + 1
    if values < least + 2:
        with pytest.raises(Refusal):
            split_budget(values, 2 * pairs, groups, full_rank, least)
        return
    rank, rope_dim = split_budget(values, 2 * pairs, groups, full_rank, least)
    assert rank + rope_dim <= values
    assert rope_dim % 2 == 0
    assert 2 <= rope_dim <= groups * 2 * pairs
    assert least <= rank <= full_rank(rope_dim)
    check_fold(default_fold(rope_dim, 2 * pairs), rope_dim, 2 * pairs)
    left = values - rank - rope_dim
    if left and rank < full_rank(rope_dim):
        assert rank % 16 == 0, "below full rank values are left over only for such a rank"
        assert left < 16
        assert left <= 0.05 * values
    elif left:
        room = rope_dim < groups * 2 * pairs
        assert not room or values - rank - rope_dim < 2, "and only where everything is rope"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (576, (512, 64)),  # a quarter of 576 is 144: all 64 dims of a head, and the cache of DeepSeek-V3 itself
        (256, (192, 64)),
        (255, (223, 32)),  # 64 is more than a quarter; 208 would give up 6 %
        (280, (208, 64)),  # 216 would be no multiple of 16; 8 are less than 5 %
        (819, (752, 64)),
        (128, (96, 32)),
        (40, (32, 8)),
        (4, (2, 2)),
        (3, (1, 2)),
    ],
)
def test_about_a_quarter_turns_at_most_one_head(values: int, expected: tuple[int, int]) -> None:
    assert split_budget(values, 64, 32, lambda rope_dim: 4096, 1) == expected


def test_beyond_full_rank_the_rest_turns() -> None:
    def full_rank(rope_dim: int) -> int:
        return min(100, 2 * 4 * 16 - rope_dim) + 1

    assert split_budget(110, 16, 4, full_rank, 2) == (94, 16)
    assert split_budget(133, 16, 4, full_rank, 2) == (65, 64)  # 97 + 32 is full, and all of RoPE is fuller
    assert split_budget(129, 16, 4, full_rank, 2) == (97, 32)
    assert split_budget(1000, 16, 4, full_rank, 2) == (65, 64)


def test_too_small_a_budget_is_refused_with_what_it_takes() -> None:
    message = "the budget leaves 3 values per layer and token; a latent needs at least 2, its rotary key 2"
    with pytest.raises(Refusal, match=re.escape(message)):
        split_budget(3, 64, 8, lambda rope_dim: 100, 2)
