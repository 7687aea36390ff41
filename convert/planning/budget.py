"""How a KV budget is split into rank and rotary dims, and which folds of frequencies fit. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

from attention.errors import Refusal
from attention.spec import RANK_STEP

_GIVEN_UP = 0.05  # of a budget, for a rank that the CUDA kernel serves


def default_fold(rope_dim: int, rotary_dim: int) -> int:
    """The fewest neighbouring frequencies that have to count as one for P dims to be spread evenly over D."""
    return rotary_dim // math.gcd(rotary_dim, rope_dim)


def check_fold(fold: int, rope_dim: int, rotary_dim: int) -> None:
    """Refuse a `--freqfold` with which the components of a band cannot be dealt out evenly."""
    frequencies = rotary_dim // 2
    if fold < 1 or frequencies % fold or fold * rope_dim % rotary_dim:
        choices = [f for f in range(1, frequencies + 1) if frequencies % f == 0 and f * rope_dim % rotary_dim == 0]
        raise Refusal(
            f"cannot fold {frequencies} frequencies by {fold} for {rope_dim} rotary dims: the fold must divide {frequencies}, "
            f"and fold × {rope_dim} must be a multiple of {rotary_dim} (choose {', '.join(map(str, choices))})"
        )


def split_budget(values: int, rotary_dim: int, groups: int, full_rank: Callable[[int], int], least: int) -> tuple[int, int]:
    """Rank and rotary dims for a number of cached values per layer and token.

    A quarter turns, as a power of two share of one head's rotary dims, at most all of them: what the published
    conversions found best of their two or three choices, and what keeps a query small enough for common kernels. Beyond
    full rank the rest turns as well.

    Args:
        values: R + P, at most.
        rotary_dim: Rotary dims of one head.
        groups: KV heads of the source.
        full_rank: Rotary dims → the rank beyond which nothing is gained.
        least: The smallest rank that holds anything.

    Returns:
        R and P.

    Raises:
        Refusal: No rank fits.
    """
    if values < least + 2:
        raise Refusal(
            f"the budget leaves {values} values per layer and token; a latent needs at least {least}, its rotary key 2"
        )
    rope_dim, most = rotary_dim, min(groups * rotary_dim, (values - least) // 2 * 2)
    while rope_dim > 2 and (rope_dim > values / 4 or values - rope_dim < least):
        rope_dim = rope_dim // 2 if rope_dim % 4 == 0 else 2
    while rope_dim < most and values - rope_dim > full_rank(rope_dim):
        rope_dim = min(most, rope_dim + min(rope_dim, rotary_dim))
    return served_rank(values - rope_dim, full_rank(rope_dim), values), rope_dim


def served_rank(rank: int, full_rank: int, values: int) -> int:
    """The largest rank worth having up to a given one.

    Rounded down to a multiple of 16 if that gives up no more than 5 % of the values: of a large model's some thousandths,
    while a small model keeps what it has. Full rank is left at that: it loses nothing.

    Args:
        rank: At most.
        full_rank: The rank beyond which nothing is gained.
        values: R + P.
    """
    if rank >= full_rank:
        return full_rank
    over = rank % RANK_STEP if rank > RANK_STEP else 0
    return rank - over if over <= _GIVEN_UP * values else rank
