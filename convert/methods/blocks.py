"""Blocks of text of one length, whose positions may skip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention.forward import Block
from attention.spread import evenly_spread, spread_blocks

_JUDGING = 8  # one block of so many


@dataclass(frozen=True)
class Blocks:
    """Blocks of tokens, or of what a layer makes of them: a row each.

    Attributes:
        rows: `[n, T, …]`.
        positions: `[n, T]`, int64, on the CPU: ascending in each row, and they may skip.
    """

    rows: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def whole(cls, rows: torch.Tensor) -> Blocks:
        """Blocks whose positions do not skip."""
        return cls(rows, torch.arange(rows.shape[1]).repeat(len(rows), 1))

    @property
    def blocks(self) -> list[Block]:
        """The blocks, in order."""
        return [Block(x, at) for x, at in zip(self.rows, self.positions.tolist(), strict=True)]

    @property
    def context(self) -> int:
        """Tokens of a block: T."""
        return self.rows.shape[1]

    def of(self, rows: Sequence[int]) -> Blocks:
        """Some of the blocks."""
        return Blocks(self.rows[list(rows)], self.positions[list(rows)])

    def spread(self, tokens: int) -> Blocks:
        """At most so many tokens in evenly spread blocks, but at least one block."""
        return self.of(spread_blocks(tokens, len(self.rows), self.context))

    def to(self, device: torch.device) -> Blocks:
        return Blocks(self.rows.to(device), self.positions)

    def parted(self) -> tuple[list[int], list[int]]:
        """Blocks to fit on, and others to judge by: an eighth of those that skip, and of the rest. A single one does both."""
        skips = self.positions[:, -1] >= self.context
        kinds = [part for kind in (False, True) if len(part := (skips == kind).nonzero().flatten().tolist()) > 1]
        others = [part[i] for part in kinds for i in evenly_spread(max(1, len(part) // _JUDGING), len(part))]
        others = others or [len(skips) - 1]
        return [row for row in range(len(skips)) if row not in others or len(skips) == 1], others

    def batches(self, tokens: int) -> list[list[int]]:
        """All blocks in order, at most so many tokens at a time, but at least one block."""
        return [part.tolist() for part in torch.arange(len(self.rows)).split(max(1, tokens // self.context))]
