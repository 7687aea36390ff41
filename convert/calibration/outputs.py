"""W_O and its bias fitted to what the source adds to the residual stream, plus what the stream lacks behind converted layers.

Ridge regression on what the converted heads read. Each half of the text says how well a ridge that is fitted on the other half
holds, and the ridge that holds best is taken: a small change is easily fitted to chance, a large one is not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch

from attention.record import Record
from attention.spread import evenly_spread

_RIDGES = (1e-3, 1e-2, 1e-1)  # of the mean square of what a dim of a head reads; 1 was chosen everywhere, and lost more
_JUDGED = 1024  # outputs, by which ridges are compared: solving for all outputs of a wide model takes long
_ROUNDING = 1e-8  # of the output's energy: what does not lack more than that is left as it is


class _Sums(NamedTuple):
    """Of what heads read r `[H D]` and what is missing m `[E]`, fp64; each token counts by its weight.

    Attributes:
        square: `[H D, H D]`, Σ r rᵀ.
        cross: `[H D, E]`, Σ r mᵀ.
        read: `[H D]`, Σ r.
        missing: `[E]`, Σ m.
        missing_energy: Σ |m|², a scalar.
        target_energy: Σ |m + what is there|², a scalar.
        tokens: The sum of their weights, a scalar.
    """

    square: torch.Tensor
    cross: torch.Tensor
    read: torch.Tensor
    missing: torch.Tensor
    missing_energy: torch.Tensor
    target_energy: torch.Tensor
    tokens: torch.Tensor

    def plus(self, other: _Sums) -> _Sums:
        """Of the tokens of both."""
        return _Sums(*map(torch.add, self, other))

    def of(self, outputs: list[int]) -> _Sums:
        """Of some outputs only. Both energies stay those of all, which shifts errors by a constant."""
        return self._replace(cross=self.cross[:, outputs], missing=self.missing[outputs])

    def fitted(self, ridge: float, biased: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The change of W_O as a map of r, `[H D, E]`, and of its bias `[E]`, which is zero without one."""
        square, cross = self.square, self.cross
        if biased:
            square = square - torch.outer(self.read, self.read) / self.tokens
            cross = cross - torch.outer(self.read, self.missing) / self.tokens
        least = (ridge * square.diagonal().mean()).clamp_min(1e-30)  # heads may read nothing but zeros
        change = torch.linalg.solve(square + least * torch.eye(len(square)).to(square), cross)
        bias = (self.missing - self.read @ change) / self.tokens if biased else torch.zeros_like(self.missing)
        return change, bias

    def error(self, change: torch.Tensor, bias: torch.Tensor) -> float:
        """Σ |m − changeᵀ r − bias|²."""
        explained = 2 * ((change * self.cross).sum() + bias @ self.missing)
        added = ((self.square @ change) * change).sum() + 2 * bias @ (self.read @ change) + self.tokens * bias.square().sum()
        return float(self.missing_energy) + float(added - explained)


class OutputFit:
    """Running sums of a regression of the output projection.

    Args:
        record: Its `o`, and `o_bias` if it has one, are what is fitted.
    """

    def __init__(self, record: Record) -> None:
        self._record, self._blocks = record, 0
        self._halves: dict[int, _Sums] = {}  # of the blocks with even numbers, and of those with odd ones

    def see(self, read: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Add what the heads read `[b, T, H D]` and what should come out `[b, T, E]`; errors count `weight [b, T]` times."""
        scale = torch.ones_like(read[..., :1]) if weight is None else weight[..., None].sqrt()
        for half in (0, 1):
            rows = slice((half + self._blocks) % 2, None, 2)
            if len(read[rows]):
                sums = self._sums(*(part[rows].flatten(0, 1) for part in (read, target, scale)))
                self._halves[half] = self._halves[half].plus(sums) if half in self._halves else sums
        self._blocks += len(read)

    def missing(self, read: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What the output projection, before it is fitted, lacks, `[…, E]`."""
        missing = target - read @ self._record.o.float().flatten(1).T
        return missing if self._record.o_bias is None else missing - self._record.o_bias.float()

    def _sums(self, read: torch.Tensor, target: torch.Tensor, scale: torch.Tensor) -> _Sums:
        missing = self.missing(read, target)
        read, missing, target = scale * read, scale * missing, scale * target
        square, cross, of_read, of_missing = read.T @ read, read.T @ missing, read.T @ scale, missing.T @ scale
        return _Sums(
            square=square.double(),
            cross=cross.double(),
            read=of_read[:, 0].double(),
            missing=of_missing[:, 0].double(),
            missing_energy=missing.square().sum().double(),
            target_energy=target.square().sum().double(),
            tokens=scale.double().square().sum(),
        )

    def record(self) -> Record:
        """The record with its output projection fitted to what was seen."""
        a, total = self._record, reduce(_Sums.plus, self._halves.values())
        if total.missing_energy <= _ROUNDING * total.target_energy:
            return a
        change, bias = total.fitted(self._ridge(), a.o_bias is not None)
        o = a.o.double() + change.T.view(a.o.shape)
        return replace(a, o=o.float(), o_bias=None if a.o_bias is None else (a.o_bias.double() + bias).float())

    def _ridge(self) -> float:
        """The ridge with the least error on the half that it was not fitted on; the largest if there is but one block."""
        if len(self._halves) < 2:
            return _RIDGES[-1]
        width, biased = self._record.o.shape[0], self._record.o_bias is not None
        outputs = evenly_spread(min(width, _JUDGED), width)
        halves = [self._halves[half].of(outputs) for half in (0, 1)]
        errors = [sum(other.error(*one.fitted(ridge, biased)) for one, other in (halves, halves[::-1])) for ridge in _RIDGES]
        return _RIDGES[min(range(len(_RIDGES)), key=errors.__getitem__)]
