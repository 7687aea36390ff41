"""How a budget is split, and how frequencies are folded: known answers, and what must hold of every budget."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.errors import Refusal
from convert.methods.frequencies import pairs_by_stride
from convert.planning.budget import FORMATS, ROTARY, LatentBounds, fold_of, format_of


def split_budget(
    values: int, share: float, rotary: int, groups: int, full: Callable[[int], int], least: int, evenly: bool = False
) -> tuple[int, int]:
    """Rank and rotary dims where full rank and the least rank are these."""
    bounds: Any = SimpleNamespace(
        before=SimpleNamespace(num_layers=share, values_per_token=values), rotary_dim=rotary, rotary_keys=groups,
        host=SimpleNamespace(portable=evenly), full_rank=full, with_reserved=lambda rank: least if rank == 1 else rank,
    )  # fmt: skip
    return LatentBounds.for_budget(bounds, values)


@settings(deadline=None)
@given(pairs=st.integers(1, 64), kept=st.integers(1, 300))
def test_the_fold_is_the_smallest_that_deals_out_evenly(pairs: int, kept: int) -> None:
    rotary_dim, rope_dim = 2 * pairs, 2 * kept
    fold = fold_of(rope_dim, rotary_dim)
    assert fold == next(f for f in range(1, rotary_dim + 1) if f * rope_dim % rotary_dim == 0)
    counts = [[pair // fold for pair in pairs_by_stride(rope_dim, rotary_dim)].count(band) for band in range(pairs // fold)]
    assert (pairs % fold, len(set(counts))) == (0, 1), "every band has as many rope components"


@settings(max_examples=300, deadline=None)
@given(
    values=st.integers(0, 3000), share=st.floats(0.01, 1), pairs=st.integers(0, 64), groups=st.integers(1, 16),
    nope=st.integers(1, 8), width=st.integers(1, 2000), reserved=st.integers(1, 2), evenly=st.booleans(),
)  # fmt: skip
def test_a_budget_is_kept_and_nothing_of_it_wasted(
    values: int, share: float, pairs: int, groups: int, nope: int, width: int, reserved: int, evenly: bool
) -> None:
    rotary, least, key = 2 * pairs, reserved + 1, min(2, 2 * pairs)

    def full_rank(rope_dim: int) -> int:
        return min(width, 2 * groups * (rotary + nope) - rope_dim) + reserved

    if values < least + key:
        with pytest.raises(Refusal, match=f"leaves {values} values per layer and token; a latent needs at least {least}"):
            split_budget(values, share, rotary, groups, full_rank, least, evenly)
        return
    rank, rope_dim = split_budget(values, share, rotary, groups, full_rank, least, evenly)
    assert rank + rope_dim <= values
    assert rope_dim % 2 == 0
    assert key <= rope_dim <= groups * rotary
    assert least <= rank <= full_rank(rope_dim)
    left = values - rank - rope_dim
    if left and rank < full_rank(rope_dim):
        assert rank % 16 == 0, "below full rank values are left over only for such a rank"
        assert left < 16
        assert left <= 0.05 * values
    elif left > 1:
        assert rope_dim == groups * rotary or values - least - rope_dim < 2, "and only where everything is rope"


@pytest.mark.parametrize("share", [0.05, 0.125, 0.25, 0.5, 1.0])
def test_a_share_of_what_rotates_is_kept(share: float) -> None:
    """Where full rank is far away."""
    for rotary_dim in (16, 128):
        rank, rope_dim = split_budget(4096, share, rotary_dim, 32, lambda rope_dim: 8192, 1)
        wanted = share * 32 * ROTARY * rotary_dim
        step = 16 if wanted >= 32 else 8
        assert wanted - step < rope_dim <= wanted
        assert rope_dim % step == 0
        assert rank == (4096 - rope_dim) // 16 * 16
    assert split_budget(4, share, 128, 32, lambda rope_dim: 4096, 1)[0] >= 1
    assert split_budget(30, share, 0, 32, lambda rope_dim: 4096, 1) == (30, 0), "nothing rotates"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (576, (512, 64)),  # a quarter of 576 is 144: all 64 dims of a head, and the cache of DeepSeek-V3 itself
        (255, (223, 32)),  # 64 is more than a quarter; 208 would give up 6 %
        (280, (208, 64)),  # 216 would be no multiple of 16; 8 are less than 5 %
        (40, (32, 8)),
        (4, (2, 2)),
        (3, (1, 2)),
    ],
)
def test_frequencies_that_spread_evenly_are_about_a_quarter(values: int, expected: tuple[int, int]) -> None:
    assert split_budget(values, 0.5, 64, 32, lambda rope_dim: 4096, 1, evenly=True) == expected


def test_beyond_full_rank_the_rest_turns() -> None:
    def full_rank(rope_dim: int) -> int:
        return min(100, 2 * 4 * 16 - rope_dim) + 1

    assert split_budget(1000, 1.0, 16, 4, full_rank, 2) == (65, 64)
    for values in (110, 129, 133):
        rank, rope_dim = split_budget(values, 1.0, 16, 4, full_rank, 2)
        assert rank == min(full_rank(rope_dim), values - rope_dim)


def test_the_format_of_a_budget_is_the_first_that_is_stored() -> None:
    every = {form for _, formats in FORMATS for form in formats}
    for above, formats in FORMATS:
        assert format_of(above, every) == formats[0]
        assert format_of(above, {formats[-1]}) == formats[-1]
        assert format_of(above, ()) is None
    assert [above for above, _ in FORMATS] == sorted((above for above, _ in FORMATS), reverse=True)
