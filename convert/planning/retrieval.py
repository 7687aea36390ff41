"""Rows of text that retrieve: runs of its own tokens come back, as far apart as a model has positions.

Ordinary text hardly ever repeats what nothing else predicts, so statistics of it do not see how heads find a token again. And
it shows no distances beyond its blocks. Here positions skip between the stretches of a row (PoSE, arXiv 2309.10400), so that
short rows hold all distances.
"""

import math

import torch

_SHORTEST, _LONGEST = 6, 64  # tokens of a run
_BETWEEN = 8, 96  # tokens of text between two runs
_STRETCHES = 4  # of a row, between which positions skip
_GOLDEN = (5**0.5 - 1) / 2  # whose multiples, without their whole parts, fill the unit interval evenly, however many


def retrieving(rows: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[n, T]` in which half of the runs repeat an earlier one, and the positions of their tokens `[n, T]`.

    Runs are drawn with the frequencies that tokens have in these rows. Their lengths are even in the logarithm, and so are the
    distances at which they come back, and the spans of rows, of which the first reaches the limit.

    Args:
        rows: Token ids `[n, T]`.
        limit: Positions stay below it. T for no skips.
    """
    reached, generator = torch.bincount(rows.flatten()).double().cumsum(0), torch.Generator().manual_seed(0)
    made, positions, length = rows.clone(), torch.empty_like(rows), rows.shape[1]
    for number, places in enumerate(positions):
        span = int(length * (limit / length) ** (1 - number * _GOLDEN % 1))
        places.copy_(_positions(length, span, generator))
    for row, stand in zip(made, positions.tolist(), strict=True):
        _fill(row, stand, reached, generator)
    return made, positions


def _fill(row: torch.Tensor, positions: list[int], reached: torch.Tensor, generator: torch.Generator) -> None:
    """Write runs into a row; `reached` counts the tokens up to each id."""
    runs, longest = list[tuple[int, torch.Tensor]](), min(_LONGEST, max(_SHORTEST, len(row) // 8))
    least, most = _BETWEEN[0], min(_BETWEEN[1], max(_BETWEEN[0], len(row) // 4))
    place = _between(least, most, generator)
    while place < len(row):
        if runs and _chance(generator) < 0.5:
            position = positions[place]
            distance = _between(least, position, generator)
            run = min(runs, key=lambda run: abs(math.log((position - run[0]) / distance)))[1]
        else:
            chances = torch.rand(_between(_SHORTEST, longest, generator), generator=generator, dtype=torch.float64)
            run = torch.searchsorted(reached, chances * reached[-1], right=True)
            runs.append((positions[place], run))
        row[place : place + len(run)] = run[: len(row) - place]
        place += len(run) + _between(least, most, generator)


def _positions(length: int, span: int, generator: torch.Generator) -> torch.Tensor:
    """Positions from 0 up to less than `span`, by skips of random shares."""
    positions = torch.arange(length)
    shares = torch.rand(_STRETCHES - 1, generator=generator, dtype=torch.float64)
    for share in shares / shares.sum():
        positions[int(_chance(generator) * length) :] += int(share * (span - length))
    return positions


def _between(low: int, high: int, generator: torch.Generator) -> int:
    """A number between two others, whose logarithm is even."""
    return int(low * math.exp(_chance(generator) * math.log(high / low)))


def _chance(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))
