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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from attention.forward import Heads, causal_softmax, heads_of, hide_future, joined, shared, spans, values_of
from attention.record import Attention, FactoredAttention, Record
from attention.rope import Rotation

_STEPS = 7
_TOKENS = 4096  # whose logits are fitted, spread evenly over the sample: a long block has more
_SPAN = 128  # tokens
_TOGETHER = 2**20  # logits of one span of a block, of as many heads as are fitted together
_SAMPLED = 64  # tokens, spread evenly, for which keys are rotated back
_RIDGE = 1e-3
_ROUNDING = 1e-8  # of an output's energy: what does not lose more than that is left as it is
_WHOLE = 0.9  # of a change: a larger share of it is not told from all of it


def refitted_queries(before: Attention, after: Record, x: torch.Tensor) -> Record:
    """The result with queries that fit, as far as that brings its outputs closer to the source's.

    Args:
        before: The source's record.
        after: The result's, whose heads are in the same order.
        x: `[n, T, E]`, inputs in blocks from position 0.
    """
    if before.k_norm is not None:  # the norm follows the queries' projection: no map of theirs can be absorbed
        return after
    x = x.float()
    blocks = [(heads_of(before, block), heads_of(after, block)) for block in x]
    parts = _together(len(before.q), x.shape[1])
    free = _free(before, after)
    change = torch.cat([_solved([_Fit.of(a.part(heads), b.part(heads)) for a, b in blocks], free) for heads in parts])

    def compared(*shares: float) -> torch.Tensor:
        """Inner products `[1 + shares, 1 + shares]` of the source's outputs and of each result's less those; fp64."""
        total = torch.zeros(1 + len(shares), 1 + len(shares), dtype=torch.float64, device=x.device)
        for block, sides in zip(x, blocks, strict=True):
            outputs = _outputs(before, after, block, sides, change, shares)
            outputs[1:] -= outputs[:1]
            rows = outputs.flatten(1).double()
            total += rows @ rows.T
        return total.cpu()

    found = compared(0.0, 1.0)
    energy, *losses = found.diagonal().tolist()
    errors = dict(zip((0.0, 1.0), losses, strict=True))
    # If outputs were linear in the share of the change, the error would be least at this one.
    share = float((found[1, 1] - found[1, 2]) / (found[1, 1] + found[2, 2] - 2 * found[1, 2]))
    if 0 < share < _WHOLE:
        errors[share] = float(compared(share)[1, 1])
    best = min(errors, key=errors.__getitem__)
    return after if not best or errors[0.0] <= _ROUNDING * energy else _applied(before, after, best * change)


def _together(count: int, context: int) -> list[slice]:
    """Consecutive heads of `count`, as many at a time as are fitted together."""
    parts = -(-count // max(1, _TOGETHER // (context * _SPAN)))
    size = -(-count // parts)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(heads: Heads, parts: Iterable[slice]) -> Iterator[torch.Tensor]:
    """`[h, t, s]` of each part's t tokens, for all s up to the last of them."""
    queries, keys = heads.scale * heads.queries, heads.keys
    for tokens in parts:
        yield queries[:, tokens] @ keys[:, : tokens.stop].mT


@dataclass(frozen=True)
class _Met:
    """What the queries of some heads meet in one block.

    Attributes:
        queries: `[h, T, D]`, the source's, before they are rotated.
        nope: `[h, T, N]`, or `[1, T, N]` where heads share it: what is kept and not rotated, times the scale of logits.
        rope: `[h, T, P]` or `[1, T, P]`: what is kept and rotated, times the scale of logits.
        rotation: Rotates rows by the tokens' positions.
    """

    queries: torch.Tensor
    nope: torch.Tensor
    rope: torch.Tensor
    rotation: Rotation

    @classmethod
    def of(cls, source: Heads, result: Heads) -> _Met:
        return cls(source.plain, result.scale * result.kept_nope, result.scale * result.kept_rope, result.rotation)

    @property
    def lifts(self) -> bool:
        """Whether what is kept is taken through A to the queries, because it has more dims than they."""
        return self.nope.shape[-1] > self.queries.shape[-1]

    def logits(self, change: torch.Tensor, parts: Iterable[slice]) -> Iterator[torch.Tensor]:
        """`[h, t, s]` of each part, which a change of A `[h, D, N + P]` adds."""
        nope, rope = change.tensor_split([self.nope.shape[-1]], -1)
        queries, kept = (self.queries, self.nope @ nope.mT) if self.lifts else (self.queries @ nope, self.nope)
        queries, kept = joined(queries, self.rotation(self.queries @ rope)), joined(kept, self.rope)
        for tokens in parts:
            yield queries[:, tokens] @ kept[:, : tokens.stop].mT

    def gradient(self, pulls: Iterable[torch.Tensor], parts: Iterable[slice]) -> torch.Tensor:
        """`[h, D, N + P]`, by A, of the sum over all logits, each times its pull `[h, t, s]`."""
        queries, lifts = self.queries, self.lifts
        of_nope = torch.zeros_like(queries) if lifts else queries.new_zeros(*queries.shape[:2], self.nope.shape[-1])
        of_rope = queries.new_zeros(*queries.shape[:2], self.rope.shape[-1])
        for tokens, pull in zip(parts, pulls, strict=True):
            of_rope[:, tokens] = pull @ self.rope[:, : tokens.stop]
            if lifts:
                of_nope[:, : tokens.stop] += pull.mT @ queries[:, tokens]
            else:
                of_nope[:, tokens] = pull @ self.nope[:, : tokens.stop]
        nope = of_nope.mT @ self.nope if lifts else queries.mT @ of_nope
        return torch.cat((nope, queries.mT @ self.rotation.adjoint(of_rope)), -1)


@dataclass(frozen=True)
class _Fit:
    """The least squares problem of some heads, as far as one block states it.

    Attributes:
        met: What the heads meet.
        spans: Tokens that are fitted.
        weights: `[h, t, s]` of each span, the source's attention p.
        wanted: `[h, D, N + P]`, the descent of half the squared error where A is not changed.
    """

    met: _Met
    spans: list[slice]
    weights: list[torch.Tensor]
    wanted: torch.Tensor

    @classmethod
    def of(cls, source: Heads, result: Heads) -> _Fit:
        """The problem of a block's heads, or of as many of its spans as are fitted."""
        count = source.plain.shape[1]
        stride = -(-count // _TOKENS)
        parts, met = spans(count, _SPAN)[stride // 2 :: stride], _Met.of(source, result)
        weights, pulls = [], []
        for logits, own in zip(_logits(source, parts), _logits(result, parts), strict=True):
            weights.append(causal_softmax(logits))
            pulls.append(_centred(logits.sub_(own), weights[-1]))
        return cls(met, parts, weights, met.gradient(pulls, parts))

    @property
    def count(self) -> int:
        """Tokens that are fitted."""
        return sum(tokens.stop - tokens.start for tokens in self.spans)

    def curvature(self, change: torch.Tensor) -> torch.Tensor:
        """`[h, D, N + P]`, the gradient of half the squared error less that where A is not changed."""
        return self.met.gradient(map(_centred, self.met.logits(change, self.spans), self.weights), self.spans)

    def moments(self, sampled: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ_t q qᵀ `[h, D, D]`, and Σ_t Cov_{s ~ p_t} φ_ts `[h, N + P, N + P]`, of parts with and without positions apart.

        They precondition the problem and size its ridge; its solution needs no more of them than that.

        Args:
            sampled: Of how many tokens to rotate keys back.
        """
        queries = torch.cat([self.met.queries[:, tokens] for tokens in self.spans], 1)
        nope, rope = self._nope_spread(), self._rope_spread(-(-sampled // len(self.spans)))
        split = nope.shape[-1]
        spread = nope.new_zeros(len(nope), split + rope.shape[-1], split + rope.shape[-1])
        spread[:, :split, :split], spread[:, split:, split:] = nope, rope
        return queries.mT @ queries, spread

    def _nope_spread(self) -> torch.Tensor:
        nope = self.met.nope
        seen = nope.new_zeros(len(self.weights[0]), nope.shape[1])
        of_means = nope.new_zeros(())
        for tokens, weights in zip(self.spans, self.weights, strict=True):
            seen[:, : tokens.stop] += weights.sum(1)
            means = weights @ nope[:, : tokens.stop]
            of_means = of_means + means.mT @ means
        return nope.mT @ (seen[..., None] * nope) - of_means

    def _rope_spread(self, sampled: int) -> torch.Tensor:
        """Of keys as queries see them that are not rotated: rotated back, for some tokens of each span in place of all."""
        total = self.met.rope.new_zeros(())
        for tokens, weights in zip(self.spans, self.weights, strict=True):
            length = weights.shape[1]
            count = min(length, sampled)
            rows = [(2 * i + 1) * length // (2 * count) for i in range(count)]
            back = self.met.rotation.of(tokens).adjoint
            back = replace(back, cos=back.cos[rows, None], sin=back.sin[rows, None])
            keys = back(self.met.rope[:, None, : tokens.stop].expand(-1, count, -1, -1))  # [h or 1, rows, s, P]
            weighted = weights[:, rows, :, None] * keys
            means = weighted.sum(2)
            spread = keys.flatten(1, 2).mT @ weighted.flatten(1, 2) - means.mT @ means
            total = total + length / count * spread
        return total


def _centred(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Half the gradient of the logits' variances under the weights, `[h, t, s]`; it takes the place of the logits."""
    pull = logits.mul_(weights)
    return pull.addcmul_(weights, pull.sum(-1, keepdim=True), value=-1)


def _free(before: Attention, after: Record) -> torch.Tensor:
    """`[D, N + P]`, ones for the entries of A that the result can hold.

    All of them, but where the result's nope queries are fewer than the source's dims (a smaller latent of a latent): the last
    ones then, so that only these are mapped onto the latent.
    """
    if not isinstance(after, FactoredAttention):
        return before.q.new_ones(1, 1, dtype=torch.float32)
    dims, (nope, rank) = before.q.shape[1], after.up_k.shape[1:]
    free = torch.ones(dims, rank + after.k_rope.shape[0], device=before.q.device)
    free[: dims - nope, :rank] = 0
    return free


def _solved(fits: list[_Fit], free: torch.Tensor) -> torch.Tensor:
    """`[h, D, N + P]`, the change of A after a few steps of conjugate gradients, over tokens of all blocks.

    Entries that are not `free` stay zero: gradients and preconditioned steps are projected onto the others.
    """
    moments = [fit.moments(-(-_SAMPLED // len(fits))) for fit in fits]
    queries, kept = (torch.stack(parts).sum(0) for parts in zip(*moments, strict=True))
    used = queries.flatten(1).any(-1) & kept.flatten(1).any(-1)  # else a head without queries, or that meets nothing
    spread = _diagonal(kept)
    rope = spread[:, fits[0].met.nope.shape[-1] :]
    rope[:] = rope.mean(-1, keepdim=True)
    spread = spread.maximum(1e-9 * spread.amax(-1, keepdim=True).clamp_min(1e-30))
    ridge = _RIDGE * spread
    queries = queries / sum(fit.count for fit in fits)
    queries = queries + (_RIDGE * _diagonal(queries).mean(-1, keepdim=True)).expand(-1, queries.shape[-1]).diag_embed()
    left, right = _inverse(queries, used), _inverse(kept + (ridge + 1e-9 * spread).diag_embed(), used)

    def applied(change: torch.Tensor) -> torch.Tensor:
        return free * (torch.stack([fit.curvature(change) for fit in fits]).sum(0) + queries @ change * ridge[:, None])

    residual = free * torch.stack([fit.wanted for fit in fits]).sum(0)
    change, direction = torch.zeros_like(residual), free * (left @ residual @ right)
    energy = _products(residual, direction)
    for _ in range(_STEPS):
        image = applied(direction)
        length = torch.where(energy > 0, energy / _products(direction, image), 0)
        change, residual = change + length * direction, residual - length * image
        step = free * (left @ residual @ right)
        last, energy = energy, _products(residual, step)
        direction = step + torch.where(last > 0, energy / last, 0) * direction
    return change


def _diagonal(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).clone()


def _inverse(matrices: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Of those `[h, n, n]` that are used; the identity for the others."""
    eye = torch.eye(matrices.shape[-1], dtype=torch.float64, device=matrices.device)
    return torch.linalg.inv(torch.where(used[:, None, None], matrices.double(), eye)).float()


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[h, 1, 1]`, of matrices `[h, …, …]`."""
    return (a * b).sum((1, 2), keepdim=True)


def _outputs(
    before: Attention, after: Record, x: torch.Tensor, sides: tuple[Heads, Heads], change: torch.Tensor, shares: Sequence[float]
) -> torch.Tensor:
    """`[1 + shares, T, E]`: outputs of a block `x [T, E]`, the source's and the result's with each share of a change of A.

    Logits are linear in the share.
    """
    (source, result), count, parts = sides, len(change), spans(len(x), _SPAN)
    values, new_values = values_of(before, x, source), values_of(after, x, result)
    records: list[Record] = [before, *(after for _ in shares)]
    outputs = torch.stack([x.new_zeros(x.shape) if a.o_bias is None else a.o_bias.float().expand(x.shape) for a in records])
    for heads in _together(count, len(x)):
        old, new = source.part(heads), result.part(heads)
        met, new_met = shared(values, heads, count), shared(new_values, heads, count)
        read: list[list[torch.Tensor]] = [[] for _ in records]
        added = _Met.of(old, new).logits(change[heads], parts)
        for tokens, logits, own, more in zip(parts, _logits(old, parts), _logits(new, parts), added, strict=True):
            read[0].append(hide_future(logits).softmax(-1) @ met[:, : tokens.stop])
            hide_future(own)
            for rows, share in zip(read[1:], shares, strict=True):
                rows.append(torch.add(own, more, alpha=share).softmax(-1) @ new_met[:, : tokens.stop])
        for output, record, rows in zip(outputs, records, read, strict=True):
            output += torch.cat(rows, 1).transpose(0, 1).flatten(1) @ record.o[:, heads].float().flatten(1).T
    return outputs


def _applied(before: Attention, after: Record, change: torch.Tensor) -> Record:
    q, bias = before.q.float(), before.q_bias
    if isinstance(after, FactoredAttention):
        rank = after.down.shape[0]
        maps = change[..., rank:].mT
        return replace(
            after,
            up_k=after.up_k + change[:, -after.up_k.shape[1] :, :rank],
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
