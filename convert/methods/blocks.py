"""Blocks of text of several lengths: rows of one length, of which some are cut into shorter blocks.

Models attend differently at early positions than at late ones, and rest much of their attention on a block's first token. A few
long blocks have few first tokens and few early positions; short blocks have no late ones. Many long blocks have enough of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from attention.forward import Block
from attention.spread import parted, spread_blocks

_MANY = 16  # rows, from which on all stay whole: with 8 rows the cut gained 0.05 nats on a real model, with 32 it lost 0.04
_PARTS = 4  # of every other row
_SHORTEST = 256  # tokens of a part: with shorter ones, latents of small models lost up to 15 % more


@dataclass(frozen=True)
class Blocks:
    """Rows of tokens, or of what a layer makes of them. Each row is one block, or is cut into equal ones.

    Attributes:
        rows: `[n, T, …]`; rows with as many cuts are neighbours.
        cuts: Into how many blocks each row is cut, all of which divide T.
        positions: Of each row's tokens, ascending within each block; they may skip.
    """

    rows: torch.Tensor
    cuts: tuple[int, ...]
    positions: tuple[Sequence[int], ...]

    @classmethod
    def whole(cls, rows: torch.Tensor) -> Blocks:
        """Each row is one block."""
        return cls.cut(rows, (1,) * len(rows))

    @classmethod
    def cut(cls, rows: torch.Tensor, cuts: tuple[int, ...]) -> Blocks:
        """All blocks begin at position 0, and do not skip."""
        return cls(rows, cuts, tuple(parts * tuple(range(rows.shape[1] // parts)) for parts in cuts))

    @classmethod
    def mixed(cls, rows: torch.Tensor) -> Blocks:
        """Every other of a few rows is cut into four blocks, unless these would be short. The others come first."""
        parts, context = _PARTS, rows.shape[1]
        if len(rows) >= _MANY or context % parts or context < parts * _SHORTEST:
            return cls.whole(rows)
        return cls.cut(torch.cat((rows[::2], rows[1::2])), (1,) * len(rows[::2]) + (parts,) * len(rows[1::2]))

    def beside(self, rows: torch.Tensor, positions: torch.Tensor) -> Blocks:
        """Add whole rows, whose positions `[m, T]` may skip."""
        whole = self.cuts.count(1)
        return Blocks(
            torch.cat((self.rows[:whole], rows, self.rows[whole:])),
            (1,) * len(rows) + self.cuts,
            (*self.positions[:whole], *positions.tolist(), *self.positions[whole:]),
        )

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all rows, in order."""
        rows = zip(self.rows, self.positions, self.cuts, strict=True)
        size = self.context
        return [
            Block(block, at[number * size // parts : (number + 1) * size // parts])
            for x, at, parts in rows
            for number, block in enumerate(x.chunk(parts))
        ]

    @property
    def context(self) -> int:
        """Tokens of the longest block that there may be: T."""
        return self.rows.shape[1]

    @property
    def lengths(self) -> list[int]:
        """The different lengths of blocks, longest first."""
        return [self.context // parts for parts in sorted(set(self.cuts))]

    def of(self, rows: Sequence[int]) -> Blocks:
        """Some of the rows."""
        cuts, positions = tuple(self.cuts[row] for row in rows), tuple(self.positions[row] for row in rows)
        return Blocks(self.rows[list(rows)], cuts, positions)

    def spread(self, tokens: int) -> Blocks:
        """At most so many tokens in evenly spread rows, but at least one row."""
        return self.of(spread_blocks(tokens, len(self.rows), self.context))

    def to(self, device: torch.device) -> Blocks:
        return replace(self, rows=self.rows.to(device))

    def alike(self, rows: Sequence[int]) -> list[list[int]]:
        """The rows, those of one length of blocks together."""
        return _grouped(rows, self.cuts.__getitem__)

    def parted(self) -> tuple[list[int], list[int]]:
        """Rows to fit on, and others to judge by: about an eighth of each kind. A single row does both."""
        kinds = _grouped(range(len(self.rows)), lambda row: (self.cuts[row], self.positions[row][-1] >= self.context))
        others = [part[i] for part in kinds if len(part) > 1 for i in parted(len(part))[1]]
        others = others or [len(self.rows) - 1]
        return [row for row in range(len(self.rows)) if row not in others or len(self.rows) == 1], others

    def batches(self, tokens: int) -> list[list[int]]:
        """All rows in order, at most so many tokens at a time, but at least one row; of one length of blocks each."""
        size, rows = max(1, tokens // self.context), range(len(self.rows))
        return [part[start : start + size] for part in self.alike(rows) for start in range(0, len(part), size)]

    def placed(self, rows: Sequence[int]) -> torch.Tensor:
        """The positions of rows of one length of blocks, `[b', t]`."""
        return self.shaped(rows, torch.tensor([tuple(self.positions[row]) for row in rows]))

    def shaped(self, rows: Sequence[int], found: torch.Tensor) -> torch.Tensor:
        """Rows of one length of blocks, `[b, T, …]`, as blocks `[b', t, …]`."""
        return found.reshape(len(rows) * self.cuts[rows[0]], -1, *found.shape[2:])


def _grouped(rows: Iterable[int], key: Callable[[int], Any]) -> list[list[int]]:
    """Rows of one key together, in the order of keys."""
    return [list(part) for _, part in groupby(sorted(rows, key=key), key=key)]
