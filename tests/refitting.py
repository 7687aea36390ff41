"""Records to refit, and the least squares of queries alone."""

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st
from records import block_of, blocks_of, inputs, measured, record

from attention.forward import Heads, heads_of
from attention.record import Attention, FactoredAttention, Record
from convert.calibration import keys
from convert.calibration.queries import fitted_queries
from convert.calibration.refit import _Search
from convert.calibration.survey import _AttendedSums
from convert.methods import load_grouped, load_latent
from convert.methods.latent import Allocation
from convert.methods.statistics import IN_MERGES, Attended

X = inputs(20, tokens=32, blocks=4)


def attended(x: torch.Tensor) -> Attended:
    """Moments of `x [n, T, E]` as some attention sees it: no two of them are equal."""
    sums = _AttendedSums(x.shape[-1], 4, x.device)
    for block in x:
        sums.add(heads_of(record(2, 2, 3, 2, x.shape[-1]), block_of(block)), torch.arange(len(block)))
    return dataclasses.replace(sums.moments(), matching=None)


WEIGHTS = torch.tensor([1.0, 2.0, 4.0, 3.0])[:, None, None]  # of heads
SEEN = attended(X)
any_refit = given(
    share=st.integers(1, 2), pairs=st.integers(1, 3), nope=st.integers(0, 2), biased=st.booleans(),
    pairing=st.sampled_from(["half", "interleaved"]), method=st.sampled_from(["aligned", "mean", "weighted", "svd"]),
    factor=st.sampled_from([1.0, 1.2]), seed=st.integers(0, 50),
)  # fmt: skip


def merged(a: Attention, groups: int, method: str = "aligned") -> Attention:
    return load_grouped(method).merge(a, groups, measured(X))


def latent(a: Attention, rank: int, pairs: tuple[int, ...], method: str = "weighted") -> FactoredAttention:
    return load_latent(method).factor(a, Allocation(rank, pairs), measured(X))


def fit_of(source: Heads, after: Record, x: torch.Tensor, kind: type[keys._KeyFit] = keys._KeyFit) -> keys._KeyFit:
    attended = dataclasses.replace(SEEN, matching=(WEIGHTS[:, 0, 0] - 1) / IN_MERGES)
    return keys._fits(kind, after, [block_of(x)], [source], attended)[0]


def refitted_queries(before: Attention, after: Record, x: torch.Tensor) -> Record:
    return _Search(before, blocks_of(x)).closer(after, fitted_queries(before, after, blocks_of(x), sources(before, x)))


def sources(before: Attention, x: torch.Tensor) -> list[Heads]:
    """What the source's heads make of each block."""
    return [heads_of(before, block_of(block)) for block in x]


def met(source: Heads, result: Heads, head: int) -> torch.Tensor:
    """`[t, s]`, the attention by which fits weigh the errors of a head's logits."""
    return ((source.attention(head) + result.attention(head)) / 2).detach()


def changed(one: Record, other: Record) -> set[str]:
    return {f.name for f in dataclasses.fields(one) if getattr(one, f.name) is not getattr(other, f.name)}
