"""Least squares on calibration text, after a method has done its part: the closed form of what
`convert.calibration.refine` descends.

`refitted_queries`: methods take queries, keys and frequencies for independent; here the map A from each head's queries to what
they meet is fitted to the queries and keys of the text: min E_t Var_{s ~ p_t} (q_tᵀ k_ts − q_tᵀ A φ_ts)², with p_t the source's
attention, k_ts its keys as they are rotated relative to t, and φ_ts what the result keeps of token s. W_Q (GQA) and W_UK and
the rotary queries (MLA) take A up. A few steps of preconditioned conjugate gradients, with a ridge on the change of A.

`OutputFit`: W_O and its bias are fitted to what the source adds to the residual stream, plus what the stream behind the
converted layers lacks by now: regression on what the converted heads read, with a ridge on the change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.linalg import multi_dot

from attention.forward import Heads, attention_output, causal_softmax, heads_of, spans
from attention.record import Attention, FactoredAttention, Record
from attention.rope import Rotation

_STEPS = 6
_TOKENS = 4096  # whose logits are fitted, spread evenly over the sample: a long block has more
_RIDGE = 1e-3
_ROUNDING = 1e-8  # of an output's energy: what does not lose more than that is left as it is
_SHARES = (0.5, 0.75, 1.0)  # of the change of A


def refitted_queries(before: Attention, after: Record, x: torch.Tensor) -> Record:
    """The result with queries that fit, as far as that brings its outputs closer to the source's.

    Args:
        before: The source's record.
        after: The result's, whose heads are in the same order.
        x: `[n, T, E]`, inputs in blocks from position 0.
    """
    if before.k_norm is not None:  # the norm follows the queries' projection: no map of theirs can be absorbed
        return after
    expected = attention_output(before, x)

    def error(result: Record) -> float:
        return float((attention_output(result, x) - expected).double().square().sum())

    if error(after) <= _ROUNDING * float(expected.double().square().sum()):
        return after
    blocks = [(heads_of(before, block), heads_of(after, block)) for block in x.float()]
    shut = _shut(before, after)
    change = torch.stack([_solved(_HeadFit.of(blocks, head), shut) for head in range(len(before.q))])
    results = [after, *(_applied(before, after, share * change) for share in _SHARES)]
    return min(results, key=error)


def _shut(before: Attention, after: Record) -> int:
    """The first dims of queries that no map takes to the latent: those that rotated in the source and still do."""
    return before.q.shape[1] - after.q_nope.shape[1] if isinstance(after, FactoredAttention) else 0


@dataclass(frozen=True)
class _Span:
    """Consecutive tokens of a block, and what one head of theirs meets: s tokens up to the last of them.

    Attributes:
        queries: `[t, D]`.
        weights: `[t, s]`, the source's attention p.
        missing: `[t, s]`, of the logits.
        nope: `[s, N]`, what is kept and does not turn, times the scale of logits.
        rope: `[s, P]`, what is kept and turns, rotated, times the scale of logits.
        rotation: Turns rows by the tokens' positions.
    """

    queries: torch.Tensor
    weights: torch.Tensor
    missing: torch.Tensor
    nope: torch.Tensor
    rope: torch.Tensor
    rotation: Rotation

    @classmethod
    def of(cls, source: Heads, result: Heads, head: int) -> list[_Span]:
        """Those of one block, or as many of them as are fitted."""
        found, parts = [], spans(source.plain.shape[1])
        nope, rope = (result.scale * rows for rows in result.kept(head))
        stride = -(-source.plain.shape[1] // _TOKENS)
        for tokens in parts[stride // 2 :: stride]:
            logits, seen = source.logits(head, tokens), slice(tokens.stop)
            missing, weights = logits - result.logits(head, tokens), causal_softmax(logits)
            rotation = result.rotation.of(tokens)
            found.append(cls(source.plain[head, tokens], weights, missing, nope[seen], rope[seen], rotation))
        return found

    def logits(self, change: torch.Tensor) -> torch.Tensor:
        """`[t, s]`, what a change of A `[D, N + P]` adds."""
        nope, rope = change.tensor_split([self.nope.shape[1]], -1)
        return multi_dot([self.queries, nope, self.nope.mT]) + self.rotation(self.queries @ rope) @ self.rope.mT

    def pulled(self, logits: torch.Tensor) -> torch.Tensor:
        """`[D, N + P]`, the gradient by A of half the logits' variances under p, the sum over tokens."""
        pull = self.weights * logits
        pull = pull.addcmul_(self.weights, pull.sum(-1, keepdim=True), value=-1)
        nope = multi_dot([self.queries.mT, pull, self.nope])
        return torch.cat((nope, self.queries.mT @ self.rotation.adjoint(pull @ self.rope)), -1)

    def spread(self) -> torch.Tensor:
        """`[N + P, N + P]`, the covariance of what is kept under p, the sum over tokens."""
        kept = torch.cat((self.nope, self.rope), -1)
        mean = self.weights @ kept
        return kept.mT @ (self.weights.sum(0)[:, None] * kept) - mean.mT @ mean


@dataclass(frozen=True)
class _HeadFit:
    """The least squares problem of one head, over tokens of all blocks."""

    spans: list[_Span]

    @classmethod
    def of(cls, blocks: list[tuple[Heads, Heads]], head: int) -> _HeadFit:
        """Of the source's and the result's heads in each block."""
        return cls([span for source, result in blocks for span in _Span.of(source, result, head)])

    def wanted(self) -> torch.Tensor:
        """`[D, N + P]`, the descent of half the squared error where A is not changed."""
        return torch.stack([span.pulled(span.missing) for span in self.spans]).sum(0)

    def curvature(self, change: torch.Tensor) -> torch.Tensor:
        """`[D, N + P]`, the gradient of half the squared error less that where A is not changed."""
        return torch.stack([span.pulled(span.logits(change)) for span in self.spans]).sum(0)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ_t q qᵀ `[D, D]`, and Σ_t Cov_{s ~ p_t} φ_ts `[N + P, N + P]`, of whose rope part the mean variance alone.

        They precondition the problem and size its ridge; its solution needs no more of them than that.
        """
        queries, spread = torch.cat([span.queries for span in self.spans]), torch.stack([s.spread() for s in self.spans]).sum(0)
        nope = self.spans[0].nope.shape[1]
        # Keys turn relative to t, which mixes the dims of a pair; one variance for all of them needs no rotating back.
        variance = spread.diagonal()[nope:].mean().expand(len(spread) - nope)
        return queries.mT @ queries, torch.block_diag(spread[:nope, :nope], variance.diag())


def _solved(fit: _HeadFit, shut: int) -> torch.Tensor:
    """`[D, N + P]`, the change of A after a few steps of conjugate gradients; zero from the first `shut` dims to the N kept."""
    queries, kept = fit.moments()
    if not (queries.any() and kept.any()):  # a head without queries, or that meets nothing
        return kept.new_zeros(len(queries), len(kept))
    diagonal = kept.diagonal().clamp_min(1e-9 * kept.diagonal().max().clamp_min(1e-30))
    ridge = _RIDGE * diagonal
    count, eye = sum(len(span.queries) for span in fit.spans), torch.eye
    queries = queries / count
    queries = queries + _RIDGE * queries.diagonal().mean() * eye(len(queries)).to(queries)
    left = torch.linalg.inv(queries.double()).float()
    right = torch.linalg.inv((kept + (ridge + 1e-9 * diagonal).diag()).double()).float()

    change = torch.zeros(len(queries), len(kept)).to(queries)
    free = torch.ones_like(change)  # projecting gradients and steps keeps them conjugate
    free[:shut, : fit.spans[0].nope.shape[1]] = 0

    def applied(change: torch.Tensor) -> torch.Tensor:
        return free * (fit.curvature(change) + queries @ change * ridge)

    residual = free * fit.wanted()
    direction = step = free * (left @ residual @ right)
    energy = (residual * step).sum()
    for _ in range(_STEPS):
        if not energy > 0:
            break
        image = applied(direction)
        length = energy / (direction * image).sum()
        change, residual = change + length * direction, residual - length * image
        step = free * (left @ residual @ right)
        last, energy = energy, (residual * step).sum()
        direction = step + energy / last * direction
    return change


def _applied(before: Attention, after: Record, change: torch.Tensor) -> Record:
    q, bias = before.q.float(), before.q_bias
    if isinstance(after, FactoredAttention):
        rank = after.down.shape[0]
        maps = change[..., rank:].mT
        return replace(
            after,
            up_k=after.up_k + change[:, _shut(before, after) :, :rank],
            q_rope=after.q_rope + maps @ q,
            q_rope_bias=None if bias is None or after.q_rope_bias is None else after.q_rope_bias + _times(maps, bias),
        )
    rope = after.rotary.dims if after.rotary else 0
    nope = change.shape[-1] - rope
    change = torch.cat((change[..., nope:], change[..., :nope]), -1).mT
    new_bias = None if bias is None or after.q_bias is None else after.q_bias.float() + _times(change, bias)
    return replace(after, q=after.q.float() + change @ q, q_bias=new_bias)


def _times(maps: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (maps @ bias.float()[..., None])[..., 0]


class OutputFit:
    """Running sums of a regression of the output projection.

    Args:
        record: Its `o`, and `o_bias` if it has one, are what is fitted.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._sums: list[torch.Tensor] = []

    def see(self, read: torch.Tensor, target: torch.Tensor) -> None:
        """Add what the heads read `[b, T, H D]` and what should come out of it `[b, T, E]`."""
        read, target = read.flatten(0, 1), target.flatten(0, 1)
        missing = target - read @ self._record.o.float().flatten(1).T
        if self._record.o_bias is not None:
            missing = missing - self._record.o_bias.float()
        energies = read.new_tensor([float(len(read)), float(missing.square().sum()), float(target.square().sum())])
        new = [read.T @ read, read.T @ missing, read.sum(0), missing.sum(0), energies]
        self._sums = [a + b.double() for a, b in zip(self._sums, new, strict=True)] if self._sums else [b.double() for b in new]

    def record(self) -> Record:
        """The record with its output projection fitted."""
        a = self._record
        square, cross, read, missing, (count, lacking, whole) = self._sums
        if lacking <= _ROUNDING * whole:
            return a
        if a.o_bias is not None:
            square, cross = square - torch.outer(read, read) / count, cross - torch.outer(read, missing) / count
        ridge = (_RIDGE * square.diagonal().mean()).clamp_min(1e-30)  # heads may read nothing but zeros
        square = square + ridge * torch.eye(len(square)).to(square)
        change = torch.linalg.solve(square, cross, left=True).T
        bias = None if a.o_bias is None else (a.o_bias.double() + (missing - change @ read) / count).float()
        return replace(a, o=(a.o.double() + change.view(a.o.shape)).float(), o_bias=bias)
