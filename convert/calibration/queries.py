"""Queries fitted to what they meet: min E_t Var_{s ~ p_t} (q_tᵀ k_ts − q_tᵀ A φ_ts)² over a map A for each head.

q_t are the source's queries, p_t the attention (`missing`), k_ts its keys, rotated relative to t, and φ_ts what the result
keeps of token s. W_Q (GQA), or W_UK and the rope queries (MLA), take A up. A ridge holds back the change of A.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.functional import pad

from attention.forward import Block, Heads, Jacobian, heads_of, joined
from attention.record import Attention, FactoredAttention, Record
from attention.spread import evenly_spread
from convert.calibration.least_squares import RIDGE, SPAN, TOKENS, centred, fitted_spans, inverse, missing, solved

_TOGETHER = 2**20  # logits of one span of a block, of as many heads as are fitted together
_SAMPLED = 64  # tokens, spread evenly, for which keys are rotated back


def fitted_queries(
    before: Attention, after: Record, blocks: Sequence[Block], sources: Sequence[Heads]
) -> Callable[[float], Record]:
    """The result with a share of the change of its queries that fits, by that share.

    Args:
        before: The source's record.
        after: The result's, whose heads are in the same order.
        blocks: What the layer reads, fp32; of one length.
        sources: What the source's heads make of each.
    """
    change = torch.cat([_solved(fits) for fits in _fits(after, blocks, sources)])
    return lambda share: _applied(before, after, share * change)


def _fits(after: Record, blocks: Sequence[Block], sources: Sequence[Heads]) -> Iterator[list[_QueryFit]]:
    """For each block one problem of the heads that are fitted together; one such part of the heads after the other."""
    results = [heads_of(after, x) for x in blocks]
    jacobians = [Jacobian.of_queries(after, result) for result in results]
    for heads in _together(len(sources[0].plain), len(blocks[0])):
        parts = fitted_spans(heads.stop - heads.start, len(blocks), len(blocks[0]), TOKENS)
        every = zip(sources, results, jacobians, parts, strict=True)
        yield [_QueryFit.of(a.part(heads), b.part(heads), by.part(heads), part) for a, b, by, part in every]


def _together(count: int, context: int) -> list[slice]:
    """Consecutive heads of `count`, as many at a time as are fitted together."""
    parts = -(-count // max(1, _TOGETHER // (context * SPAN)))
    size = -(-count // parts)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True)
class _QueryFit:
    """The least squares problem of some heads, as far as one block states it.

    Attributes:
        queries: `[h, n, D]`, the source's of the fitted tokens, before they are normalised and rotated.
        nope: `[h, T, N]`, or `[1, T, N]` where heads share it: what is kept and not rotated, times the scale of logits.
        rope: `[h, T, P]` or `[1, T, P]`: what is kept and rotated, times the scale of logits.
        jacobian: Of what is between projected queries of the fitted tokens and logits: RoPE and perhaps a norm.
        rows: Of each span of these its rows among them, and the token behind its last.
        probabilities: `[h, t, s]` of each span, the attention p (`missing`).
        wanted: As of `Fit`, `[h, D, N + P]`.
    """

    queries: torch.Tensor
    nope: torch.Tensor
    rope: torch.Tensor
    jacobian: Jacobian
    rows: list[tuple[slice, int]]
    probabilities: list[torch.Tensor]
    wanted: torch.Tensor

    @classmethod
    def of(cls, source: Heads, result: Heads, jacobian: Jacobian, spans: list[slice]) -> _QueryFit:
        """The problem of a block's heads, of some of its tokens."""
        tokens = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(source.plain.device)
        ends = list(accumulate(span.stop - span.start for span in spans))
        rows = [(slice(start, end), span.stop) for start, end, span in zip([0, *ends], ends, spans, strict=False)]
        kept = result.scale * result.kept_nope, result.scale * result.kept_rope
        probabilities, pulls = missing(source, result, spans)
        fit = cls(source.plain[:, tokens], *kept, jacobian.of(tokens), rows, probabilities, source.plain.new_zeros(()))
        return replace(fit, wanted=fit._gradient(pulls))

    @property
    def lifts(self) -> bool:
        """Whether what is kept is taken through A to the queries, because it has more dims than they."""
        return self.nope.shape[-1] > self.queries.shape[-1]

    def _logits(self, change: torch.Tensor) -> Iterator[torch.Tensor]:
        """`[h, t, s]` of each span, which a change of A `[h, D, N + P]` adds."""
        nope, rope = change.tensor_split([self.nope.shape[-1]], -1)
        if self.lifts:
            queries, kept = joined(self.queries, self.jacobian(self.queries @ rope)), joined(self.nope @ nope.mT, self.rope)
        else:
            queries, kept = self.jacobian(self.queries @ joined(rope, nope)), joined(self.rope, self.nope)
        for rows, stop in self.rows:
            yield queries[:, rows] @ kept[:, :stop].mT

    def _gradient(self, pulls: Iterable[torch.Tensor]) -> torch.Tensor:
        """`[h, D, N + P]`, by A, of the sum over all logits, each times its pull `[h, t, s]`."""
        queries, kept = self.queries, self.rope if self.lifts else joined(self.rope, self.nope)
        of_queries = queries.new_zeros(*queries.shape[:2], kept.shape[-1])
        of_lifted = queries.new_zeros(len(queries), self.nope.shape[1], queries.shape[-1] if self.lifts else 0)
        for (rows, stop), pull in zip(self.rows, pulls, strict=True):
            of_queries[:, rows] = pull @ kept[:, :stop]
            if self.lifts:
                of_lifted[:, :stop] += pull.mT @ queries[:, rows]
        found = queries.mT @ self.jacobian.adjoint(of_queries)
        if self.lifts:
            return torch.cat((of_lifted.mT @ self.nope, found), -1)
        return found.roll(self.nope.shape[-1], -1)  # nope dims first

    def curvature(self, change: torch.Tensor) -> torch.Tensor:
        """As of `Fit`, `[h, D, N + P]`."""
        return self._gradient(map(centred, self._logits(change), self.probabilities))

    def moments(self, sampled: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Σ_t q qᵀ `[h, D, D]`, and Σ_t Cov_{s ~ p_t} φ_ts `[h, N + P, N + P]`, of parts with and without positions apart.

        They precondition the problem and size its ridge; its solution needs no more of them than that.

        Args:
            sampled: Of how many tokens to rotate keys back.
        """
        nope, rope = self._nope_spread(), self._rope_spread(-(-sampled // len(self.probabilities)))
        dims, rotated = nope.shape[-1], rope.shape[-1]
        spread = pad(nope, (0, rotated, 0, rotated)) + pad(rope, (dims, 0, dims, 0))
        queries, norm = self.queries, self.jacobian.norm
        if norm is not None:
            queries, gain = queries * norm.inverse, norm.gain.roll(dims, -1)  # nope dims first
            spread = gain.mT * spread * gain
        return queries.mT @ queries, spread

    def _nope_spread(self) -> torch.Tensor:
        nope = self.nope
        seen = nope.new_zeros(len(self.probabilities[0]), nope.shape[1])
        of_means = nope.new_zeros(())
        for (_, stop), probabilities in zip(self.rows, self.probabilities, strict=True):
            seen[:, :stop] += probabilities.sum(1)
            means = probabilities @ nope[:, :stop]
            of_means = of_means + means.mT @ means
        return nope.mT @ (seen[..., None] * nope) - of_means

    def _rope_spread(self, sampled: int) -> torch.Tensor:
        """Of keys as queries see them that are not rotated: rotated back, for some tokens of each span in place of all."""
        total = self.rope.new_zeros(())
        for (span, stop), probabilities in zip(self.rows, self.probabilities, strict=True):
            length = probabilities.shape[1]
            count = min(length, sampled)
            rows = evenly_spread(count, length)
            back = self.jacobian.rotation.of(span).adjoint
            back = replace(back, cos=back.cos[rows, None], sin=back.sin[rows, None])
            keys = back(self.rope[:, None, :stop].expand(-1, count, -1, -1))  # [h or 1, rows, s, P]
            weighted = probabilities[:, rows, :, None] * keys
            means = weighted.sum(2)
            spread = keys.flatten(1, 2).mT @ weighted.flatten(1, 2) - means.mT @ means
            total = total + length / count * spread
        return total


def _solved(fits: list[_QueryFit]) -> torch.Tensor:
    """`[h, D, N + P]`, the change of A."""
    moments, count = [fit.moments(-(-_SAMPLED // len(fits))) for fit in fits], sum(fit.queries.shape[1] for fit in fits)
    queries, kept = (torch.stack(parts).sum(0) for parts in zip(*moments, strict=True))
    used = queries.flatten(1).any(-1) & kept.flatten(1).any(-1)  # else a head without queries, or that meets nothing
    spread = kept.diagonal(dim1=-2, dim2=-1).clone()
    rope = spread[:, fits[0].nope.shape[-1] :]
    rope[:] = rope.mean(-1, keepdim=True)
    spread = spread.maximum(1e-9 * spread.amax(-1, keepdim=True).clamp_min(1e-30))
    ridge = RIDGE * spread
    queries = queries / count
    power = queries.diagonal(dim1=-2, dim2=-1).clone().mean(-1, keepdim=True)
    queries = queries + (RIDGE * power).expand(-1, queries.shape[-1]).diag_embed()
    left, right = inverse(queries, used), inverse(kept + (ridge + 1e-9 * spread).diag_embed(), used)
    return solved(fits, lambda change: queries @ change * ridge[:, None], lambda residual: left @ residual @ right)


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
    rope = after.rotary.dims if after.rotary else 0
    nope = change.shape[-1] - rope
    change = torch.cat((change[..., nope:], change[..., :nope]), -1).mT
    new_bias = None if bias is None or after.q_bias is None else after.q_bias.float() + _times(change, bias)
    return replace(after, q=after.q.float() + change @ q, q_bias=new_bias)


def _times(maps: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (maps @ bias.float()[..., None])[..., 0]
