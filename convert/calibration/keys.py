"""Keys fitted to the queries that meet them: min Σ_h w_h E_t Var_{s ~ p_t} (δ_ts − q̂_htᵀ R_s B x_s)² over a change B.

B changes W_K of each KV head (GQA), or the rope key of all heads (MLA; its nope keys are made of the latent, which also makes
values). δ is what the logits lack, w_h how much errors of head h count (GQA: `Attended.importance`), q̂_ht are rotated queries,
and R_s rotates token s. A ridge holds back B: a share of Σ_ht w_h q̂² times the mean square of a channel that attention sees.
Behind a QK-norm, R_s B is taken through the norm's derivative: one step of Gauss and Newton.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import torch

from attention.forward import Block, Heads, Jacobian, heads_of
from attention.qk_norm import LinearisedNorm
from attention.record import Attention, FactoredAttention, Record
from convert.calibration.least_squares import RIDGE, TOKENS, centred, fitted_spans, grouped, missing, ridged, solved
from convert.methods.statistics import IN_MERGES, Attended
from eval.machine.device import rough

_LEAST = 1e-3  # of the queries' mean power: a dim that they hardly use

F = TypeVar("F", bound="_KeyFit")


def fitted_keys(
    after: Record, blocks: Sequence[Block], sources: Sequence[Heads], attended: Attended
) -> Callable[[float], Record]:
    """The result with a share of the change of its keys that fits, by that share.

    Args:
        after: The result's record, whose heads are in the source's order.
        blocks: What the layer reads, fp32; of one length.
        sources: What the source's heads make of each.
        attended: Moments of the text as the source's attention sees it.
    """
    if isinstance(after, FactoredAttention) and not len(after.k_rope):
        return lambda share: after
    fits = _fits(_KeyFit, after, blocks, sources, attended)
    powers = [fit.power() if fit.jacobian.norm is None else fit.power() * fit.jacobian.norm.power() for fit in fits]
    power = torch.stack(powers).sum(0)
    power = power.maximum(_LEAST * power.mean(-1, keepdim=True)).clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    ridge, right = ridged(attended.seen.float())
    # `[G, D', E]`
    change = solved(fits, lambda change: ridge * power * change, lambda residual: residual / power @ right)
    if isinstance(after, FactoredAttention):
        return lambda share: replace(after, k_rope=after.k_rope.float() + share * change[0])
    return lambda share: replace(after, k=after.k.float() + share * change)


def fitted_gains(
    after: Attention, blocks: Sequence[Block], sources: Sequence[Heads], attended: Attended
) -> Callable[[float], Attention]:
    """The result with a share of the change of its key norm's gains that fits, by that share; arguments as of `fitted_keys`.

    A norm gives all keys one size, and these gains are what is left to set how sharply heads attend.
    """
    norm = after.k_norm
    assert norm is not None
    fits = _fits(_GainFit, after, blocks, sources, attended)
    power = torch.stack([fit.power() for fit in fits]).sum(0)
    power = power if len(norm.gain) > 1 else power.sum(0, keepdim=True)
    power = power.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    change = solved(fits, lambda change: RIDGE * power * change, lambda residual: residual / power)[..., 0]
    return lambda share: replace(after, k_norm=replace(norm, gain=norm.gain.float() + share * change))


def _fits(kind: type[F], after: Record, blocks: Sequence[Block], sources: Sequence[Heads], attended: Attended) -> list[F]:
    """One for each block."""
    groups, weight = (1, 0) if isinstance(after, FactoredAttention) else (len(after.k), IN_MERGES)  # over latents, all alike
    weights = attended.importance(weight).float().sqrt()
    parts = fitted_spans(len(sources[0].plain), len(blocks), len(blocks[0]), TOKENS)
    results = (heads_of(after, x) for x in blocks)  # one at a time
    every = zip(sources, results, parts, strict=True)
    return [kind.of(source, result, Jacobian.of_keys(after, result), groups, part, weights) for source, result, part in every]


@dataclass(frozen=True)
class _KeyFit:
    """The least squares problem of all keys, as far as one block states it. A KV head has n query heads and D' fitted dims.

    Attributes:
        x: `[T, E]`, what keys are made of.
        jacobian: Of what is between projected keys and logits: RoPE and perhaps a norm.
        spans: Tokens whose queries meet the keys.
        queries: `[G, n t, D']` of each span, rotated, times the scale of logits and √w.
        probabilities: `[G, n t, s]` of each span, the attention p (`missing`).
        wanted: As of `Fit`, `[G, D', E]`.
    """

    x: torch.Tensor
    jacobian: Jacobian
    spans: list[slice]
    queries: list[torch.Tensor]
    probabilities: list[torch.Tensor]
    wanted: torch.Tensor

    @classmethod
    def of(
        cls, source: Heads, result: Heads, jacobian: Jacobian, groups: int, parts: list[slice], weights: torch.Tensor
    ) -> Self:
        """The problem of a block; `weights [H, 1, 1]` or `[1, 1, 1]` are √w, which pulls and queries are multiplied by."""
        every, dtype = slice(0, len(source.plain)), rough(result.inputs.device)
        found, pulls = missing(source.part(every), result.part(every), parts)
        probabilities = [grouped(rows, groups).to(dtype) for rows in found]
        pulls = [grouped(rows.mul_(weights), groups).to(dtype) for rows in pulls]
        fitted = result.rope if result.lift is not None else torch.cat((result.rope, result.nope), -1)
        queries = [grouped(result.scale * weights * fitted[:, tokens], groups).to(dtype) for tokens in parts]
        fit = cls(result.inputs.to(dtype), jacobian, parts, queries, probabilities, result.inputs.new_zeros(()))
        return replace(fit, wanted=fit._gradient(pulls))

    def curvature(self, change: torch.Tensor) -> torch.Tensor:
        """As of `Fit`, `[G, D', E]`."""
        keys = self.keys(change).to(self.x.dtype)
        logits = (queries @ keys[:, : tokens.stop].mT for queries, tokens in zip(self.queries, self.spans, strict=True))
        return self._gradient(map(centred, logits, self.probabilities))

    def _gradient(self, pulls: Iterable[torch.Tensor]) -> torch.Tensor:
        """`[G, D', E]`, by W_K, of the sum over all logits, each times its pull `[G, n t, s]`."""
        shape = len(self.queries[0]), len(self.x), self.queries[0].shape[-1]
        of_keys = self.x.new_zeros(shape, dtype=torch.float32)  # a sum of many parts
        for tokens, queries, pull in zip(self.spans, self.queries, pulls, strict=True):
            of_keys[:, : tokens.stop] += pull.mT @ queries
        return self.adjoint(of_keys)

    def keys(self, change: torch.Tensor) -> torch.Tensor:
        """`[G, T, D']`, what a change of W_K adds to the keys."""
        return self.jacobian((self.x @ change.mT.to(self.x.dtype)).float())

    def adjoint(self, of_keys: torch.Tensor) -> torch.Tensor:
        """`[G, D', E]`, the adjoint of that."""
        return (self.jacobian.adjoint(of_keys).to(self.x.dtype).mT @ self.x).float()

    def power(self) -> torch.Tensor:
        """`[G, D']`, Σ w q̂² of each dim, averaged over the two dims of a rotary pair: all angles are alike."""
        power = torch.stack([queries.float().square().sum(1) for queries in self.queries]).sum(0)
        first = self.jacobian.rotation.of(slice(0, 1))
        right_angle = replace(first, cos=torch.zeros_like(first.cos), sin=torch.ones_like(first.sin))
        swapped = right_angle(power[:, None])[:, 0].abs()  # it gives each dim the other one of its pair; nope dims stay
        return (power + swapped) / 2


@dataclass(frozen=True)
class _GainFit(_KeyFit):
    """The same for the gains of the keys' norm: `[1, D, 1]`, or `[G, D, 1]` where each head has its own."""

    def keys(self, change: torch.Tensor) -> torch.Tensor:
        """`[G, T, D]`, what a change of the gains adds to the keys."""
        added = self._norm.unit * change[..., 0][:, None]
        return added if self.jacobian.after_rotary else self.jacobian.rotation(added)

    def adjoint(self, of_keys: torch.Tensor) -> torch.Tensor:
        """The adjoint of that."""
        of_units = of_keys if self.jacobian.after_rotary else self.jacobian.rotation.adjoint(of_keys)
        each = (of_units * self._norm.unit).sum(1)
        return (each if len(self._norm.gain) > 1 else each.sum(0, keepdim=True))[..., None]

    @property
    def _norm(self) -> LinearisedNorm:
        assert self.jacobian.norm is not None
        return self.jacobian.norm
