"""Rows of text that retrieve: runs of its own tokens come back, as far apart as a model has positions.

Ordinary text hardly ever repeats what nothing else predicts, so statistics of it do not see how heads find a token again. And
it shows no distances beyond its blocks. Here positions skip between the stretches of a row (PoSE, arXiv 2309.10400), so that
short rows hold all distances.
"""

from __future__ import annotations

import math

import torch

_SHORTEST, _LONGEST = 6, 64  # tokens of a run
_BETWEEN = 8, 96  # tokens of text between two runs
_STRETCHES = 4  # of a row, between which positions skip


def retrieving(rows: torch.Tensor, limit: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Rows `[n, T]` in which half of the runs repeat an earlier one, and the positions of their tokens.

    Runs are drawn with the frequencies that tokens have in these rows. Their lengths are even in the logarithm.

    Args:
        rows: Token ids `[n, T]`.
        limit: Positions stay below it. T for no skips.
    """
    drawn, generator = torch.bincount(rows.flatten()).double(), torch.Generator().manual_seed(0)
    made = [_row(row, drawn, generator) for row in rows]
    return torch.stack(made), [_positions(rows.shape[1], limit, generator).tolist() for _ in made]


def _row(row: torch.Tensor, drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    row, runs, longest = row.clone(), list[torch.Tensor](), min(_LONGEST, max(_SHORTEST, len(row) // 8))
    place = _between(*_BETWEEN, generator)
    while place < len(row):
        if runs and _chance(generator) < 0.5:
            run = runs[int(_chance(generator) * len(runs))]
        else:
            run = drawn.multinomial(_between(_SHORTEST, longest, generator), replacement=True, generator=generator)
            runs.append(run)
        whole = run[: len(row) - place]
        row[place : place + len(whole)] = whole
        place += len(run) + _between(*_BETWEEN, generator)
    return row


def _positions(length: int, limit: int, generator: torch.Generator) -> torch.Tensor:
    """Positions that reach up to the limit or less far, evenly in the logarithm, by skips of random shares."""
    positions, room = torch.arange(length), _between(length, limit, generator) - length
    shares = torch.rand(_STRETCHES - 1, generator=generator, dtype=torch.float64)
    for share in shares / shares.sum():
        positions[int(_chance(generator) * length) :] += int(share * room)
    return positions


def _between(low: int, high: int, generator: torch.Generator) -> int:
    """A number between two others, whose logarithm is even."""
    return int(low * math.exp(_chance(generator) * math.log(high / low)))


def _chance(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))
