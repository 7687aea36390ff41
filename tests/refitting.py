"""Records to refit, and the least squares of queries alone."""

from __future__ import annotations

import dataclasses

import torch
from records import inputs, measured, record

from attention.record import Attention, FactoredAttention, Record
from convert.calibration.queries import fitted_queries
from convert.calibration.refit import _Search
from convert.calibration.survey import _AttendedSums
from convert.methods import load_grouped, load_latent
from convert.methods.grouped import Draw
from convert.methods.latent import Allocation

X = inputs(20, tokens=32, blocks=4)
_SUMS = _AttendedSums(20, torch.device("cpu"))
for _block in X:
    _SUMS.add(record(2, 2, 3, 2, 20), _block)
SEEN = _SUMS.moments()


def merged(a: Attention, groups: int, method: str = "aligned") -> Attention:
    return load_grouped(method).merge(a, groups, Draw(torch.Generator().manual_seed(0), 0.02), measured(X))


def latent(a: Attention, rank: int, pairs: tuple[int, ...], method: str = "weighted") -> FactoredAttention:
    return load_latent(method).factor(a, Allocation(rank, pairs), measured(X))


def refitted_queries(before: Attention, after: Record, x: torch.Tensor) -> Record:
    return _Search(before, x).closer(after, fitted_queries(before, after, x))


def changed(one: Record, other: Record) -> set[str]:
    return {f.name for f in dataclasses.fields(one) if getattr(one, f.name) is not getattr(other, f.name)}
