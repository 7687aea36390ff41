"""Least squares on calibration text, after a method has done its part: the closed form of what `convert.refine` descends.

`refitted_queries`: methods take queries, keys and frequencies for independent; here the map A from each head's queries to what
they meet is fitted to the queries and keys of the text: min E_t Var_{s ~ p_t} (q_tᵀ k_ts − q_tᵀ A φ_ts)², with p_t the source's
attention, k_ts its keys as they are turned relative to t, and φ_ts what the result keeps of token s. W_Q (GQA) and W_UK and the
rotary queries (MLA) take A up. A few steps of preconditioned conjugate gradients, with a ridge on the change of A.

`OutputFit`: W_O and its bias are fitted to what the source adds to the residual stream, plus what the stream behind the
converted layers lacks by now: regression on what the converted heads read, with a ridge on the change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from convert.forward import Heads, attention_output, heads_of
from convert.record import Attention, FactoredAttention, Record

_STEPS = 6
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
    change = torch.stack([_solved(_HeadFit.of(before, after, head, blocks)) for head in range(len(before.q))])
    results = [after, *(_applied(before, after, share * change) for share in _SHARES)]
    return min(results, key=error)


@dataclass(frozen=True)
class _HeadFit:
    """The least squares problem of one head.

    Attributes:
        blocks: Of each block the queries `[T, D]`, attention `[T, T]`, what is missing of the logits `[T, T]` (centred under
            it), and what is kept `[T, N + P]`: what does not turn, and what turns, turned; times the scale of logits.
        turning: P.
        turn: Turns rows `[T, P]` by their positions.
    """

    blocks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    turning: int
    turn: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, before: Attention, after: Record, head: int, blocks: list[tuple[Heads, Heads]]) -> _HeadFit:
        found = []
        for source, result in blocks:
            weights, logits = source.weights(head), source.logits(head)
            missing = (logits - result.logits(head)).tril()  # what is masked weighs nothing, but must be finite
            kept = after.scale * torch.cat(result.kept(head), -1)
            found.append((source.plain[head], weights, _centred(missing, weights), kept))
        return cls(found, blocks[0][1].turning.shape[-1], blocks[0][1].turn)

    def gradient(self, change: torch.Tensor, target: bool) -> torch.Tensor:
        """Of half the squared error, by the change `[D, N + P]` of A; without `target`, of half its square alone."""
        total = torch.zeros_like(change)
        for queries, weights, missing, kept in self.blocks:
            with torch.enable_grad():
                leaf = change.detach().requires_grad_(True)
                still, turning = (queries @ leaf).tensor_split([change.shape[1] - self.turning], -1)
                moved = torch.cat((still, self.turn(turning)), -1)
            error = _centred(moved.detach() @ kept.mT, weights)
            error = error.sub_(missing) if target else error
            # The error is centred, so that centring has no part in the derivative by the logits: it is weight times error.
            total += torch.autograd.grad(moved, leaf, error.mul_(weights) @ kept)[0]
        return total

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ_t q qᵀ `[D, D]`, and Σ_t Cov_{s ~ p_t} φ_ts `[N + P, N + P]`, of whose turning part the mean variance alone.

        They precondition the problem and size its ridge; its solution needs no more of them than that.
        """
        of_queries = of_kept = torch.zeros(())
        for queries, weights, _, kept in self.blocks:
            of_queries = of_queries + queries.mT @ queries
            received, mean = weights.sum(0), weights @ kept
            spread = kept.mT @ (received[:, None] * kept) - mean.mT @ mean
            still = len(spread) - self.turning
            # Keys turn relative to t, which mixes the dims of a pair; one variance for all of them needs no turning back.
            variance = spread.diagonal()[still:].mean().expand(self.turning)
            of_kept = of_kept + torch.block_diag(spread[:still, :still], variance.diag())
        return of_queries, of_kept


def _solved(fit: _HeadFit) -> torch.Tensor:
    """`[D, N + P]`, the change of A after a few steps of conjugate gradients."""
    queries, kept = fit.moments()
    if not (queries.any() and kept.any()):  # a head without queries, or that meets nothing
        return kept.new_zeros(len(queries), len(kept))
    diagonal = kept.diagonal().clamp_min(1e-9 * kept.diagonal().max().clamp_min(1e-30))
    ridge = _RIDGE * diagonal
    count, eye = sum(len(block[0]) for block in fit.blocks), torch.eye
    queries = queries / count
    queries = queries + _RIDGE * queries.diagonal().mean() * eye(len(queries)).to(queries)
    left = torch.linalg.inv(queries.double()).float()
    right = torch.linalg.inv((kept + (ridge + 1e-9 * diagonal).diag()).double()).float()

    def applied(change: torch.Tensor) -> torch.Tensor:
        return fit.gradient(change, target=False) + queries @ change * ridge

    change = torch.zeros(len(queries), len(kept)).to(queries)
    residual = -fit.gradient(change, target=True)
    direction = step = left @ residual @ right
    energy = (residual * step).sum()
    for _ in range(_STEPS):
        if not energy > 0:
            break
        image = applied(direction)
        length = energy / (direction * image).sum()
        change, residual = change + length * direction, residual - length * image
        step = left @ residual @ right
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
            up_k=after.up_k + change[..., :rank],
            q_rope=after.q_rope + maps @ q,
            q_rope_bias=None if bias is None or after.q_rope_bias is None else after.q_rope_bias + _times(maps, bias),
        )
    turning = after.rotary.dims if after.rotary else 0
    still = change.shape[-1] - turning
    change = torch.cat((change[..., still:], change[..., :still]), -1).mT
    new_bias = None if bias is None or after.q_bias is None else after.q_bias.float() + _times(change, bias)
    return replace(after, q=after.q.float() + change @ q, q_bias=new_bias)


def _times(maps: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (maps @ bias.float()[..., None])[..., 0]


def _centred(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return logits - (weights * logits).sum(-1, keepdim=True)


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
