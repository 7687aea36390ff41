"""W_O and its bias fitted to what the source adds to the residual stream, plus what the stream lacks behind converted layers.

Ridge regression on what the converted heads read. Each half of the text says how well a ridge that is fitted on the other half
holds, and the ridge that holds best is taken: a small change is easily fitted to chance, a large one is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention.record import Record

_RIDGES = (1e-3, 1e-2, 1e-1)  # of the mean square of what a dim of a head reads; from 1 on, halves of the text ask for too much
_ROUNDING = 1e-8  # of the output's energy: what does not lack more than that is left as it is


@dataclass(frozen=True)
class _Sums:
    """Of what heads read r `[H D]` and what is missing m `[E]`, fp64.

    Attributes:
        square: `[H D, H D]`, Σ r rᵀ.
        cross: `[H D, E]`, Σ r mᵀ.
        read: `[H D]`, Σ r.
        missing: `[E]`, Σ m.
        lacking: Σ |m|².
        whole: Σ |m + what is there|².
        count: Tokens.
    """

    square: torch.Tensor
    cross: torch.Tensor
    read: torch.Tensor
    missing: torch.Tensor
    lacking: float
    whole: float
    count: int

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def fitted(self, ridge: float, biased: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The change of W_O as a map of r, `[H D, E]`, and of its bias `[E]`, which is zero without one."""
        square, cross = self.square, self.cross
        if biased:
            square = square - torch.outer(self.read, self.read) / self.count
            cross = cross - torch.outer(self.read, self.missing) / self.count
        least = (ridge * square.diagonal().mean()).clamp_min(1e-30)  # heads may read nothing but zeros
        change = torch.linalg.solve(square + least * torch.eye(len(square)).to(square), cross)
        bias = (self.missing - self.read @ change) / self.count if biased else torch.zeros_like(self.missing)
        return change, bias

    def error(self, change: torch.Tensor, bias: torch.Tensor) -> float:
        """Σ |m − changeᵀ r − bias|²."""
        explained = 2 * ((change * self.cross).sum() + bias @ self.missing)
        added = ((self.square @ change) * change).sum() + 2 * bias @ (self.read @ change) + self.count * bias.square().sum()
        return self.lacking + float(added - explained)


class OutputFit:
    """Running sums of a regression of the output projection.

    Args:
        record: Its `o`, and `o_bias` if it has one, are what is fitted.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._halves: dict[int, _Sums] = {}  # of the blocks with even numbers, and of those with odd ones
        self._blocks = 0

    def see(self, read: torch.Tensor, target: torch.Tensor) -> None:
        """Add what the heads read `[b, T, H D]` and what should come out of it `[b, T, E]`."""
        for half in (0, 1):
            rows = slice((half + self._blocks) % 2, None, 2)
            if len(read[rows]):
                sums = self._sums(read[rows].flatten(0, 1), target[rows].flatten(0, 1))
                self._halves[half] = self._halves[half] + sums if half in self._halves else sums
        self._blocks += len(read)

    def _sums(self, read: torch.Tensor, target: torch.Tensor) -> _Sums:
        missing = target - read @ self._record.o.float().flatten(1).T
        if self._record.o_bias is not None:
            missing = missing - self._record.o_bias.float()
        square, cross, total, lacking = (
            part.double() for part in (read.T @ read, read.T @ missing, read.sum(0), missing.sum(0))
        )
        energies = float(missing.square().sum()), float(target.square().sum())
        return _Sums(square, cross, total, lacking, *energies, len(read))

    def record(self) -> Record:
        """The record with its output projection fitted."""
        a, (first, *rest) = self._record, self._halves.values()
        total = sum(rest, first)
        if total.lacking <= _ROUNDING * total.whole:
            return a
        change, bias = total.fitted(self._ridge(), a.o_bias is not None)
        o = a.o.double() + change.T.view(a.o.shape)
        return replace(a, o=o.float(), o_bias=None if a.o_bias is None else (a.o_bias.double() + bias).float())

    def _ridge(self) -> float:
        """The ridge with the least error on the half that it was not fitted on; the smallest if there is but one block."""
        if len(self._halves) < 2:
            return _RIDGES[0]
        biased, halves = self._record.o_bias is not None, [self._halves[0], self._halves[1]]
        errors = [sum(other.error(*one.fitted(ridge, biased)) for one, other in (halves, halves[::-1])) for ridge in _RIDGES]
        return _RIDGES[min(range(len(_RIDGES)), key=errors.__getitem__)]
