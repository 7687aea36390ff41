"""Values fitted to what comes out: min E_t |ε_t − Σ_h O_h C Σ_s p̂_ht(s) x_s|² over a change C of W_V of each KV head.

ε is what the output lacks, p̂ the result's attention. A ridge holds back C: a share of Σ_h O_hᵀ O_h times the mean square of a
channel of x̄_t, what the source's heads read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from attention.forward import Block, attention_output, heads_of
from attention.record import Attention
from convert.calibration.least_squares import RIDGE, fitted_spans, grouped, inverse, logits_of, ridged, solved
from eval.machine.device import rough


def fitted_values(
    before: Attention, after: Attention, blocks: Sequence[Block], read: torch.Tensor
) -> Callable[[float], Attention]:
    """Fit values as `queries.fitted_queries` fits queries; `read`: `[E, E]`, E_t[x̄_t x̄_tᵀ] of what heads read."""
    length, lacking = len(blocks[0]), attention_output(before, blocks) - attention_output(after, blocks)
    parts = fitted_spans(len(after.q), len(blocks), length)
    fits = [_ValueFit.of(after, *block) for block in zip(blocks, lacking.split(length), parts, strict=True)]
    outputs = fits[0].outputs.float().permute(1, 2, 0, 3).flatten(1, 2)  # [G, n E, D]
    left = outputs.mT @ outputs
    least = (RIDGE * left.diagonal(dim1=1, dim2=2).mean(-1)).clamp_min(torch.finfo(torch.float32).tiny)
    left = left + least[:, None].expand(-1, left.shape[-1]).diag_embed()
    left_inverse, (ridge, right) = inverse(left), ridged(read.float())
    count = sum(tokens.stop - tokens.start for fit in fits for tokens in fit.spans)
    # One problem: the outputs of all heads are added. The change is `[G, D, E]`.
    change = solved(
        fits,
        lambda change: count * ridge * left @ change,
        lambda residual: left_inverse @ residual @ right / count,
        apart=False,
    )
    return lambda share: replace(after, v=after.v.float() + share * change)


@dataclass(frozen=True)
class _ValueFit:
    """The least squares problem of all values, as far as one block states it. A KV head has n query heads.

    Attributes:
        x: `[T, E]`, what values are made of.
        outputs: `[E, G, n, D]`, W_O of each head.
        spans: Tokens whose outputs are fitted.
        probabilities: `[G, n t, s]` of each span, the result's attention p̂.
        wanted: As of `Fit`, `[G, D, E]`.
    """

    x: torch.Tensor
    outputs: torch.Tensor
    spans: list[slice]
    probabilities: list[torch.Tensor]
    wanted: torch.Tensor

    @classmethod
    def of(cls, after: Attention, block: Block, lacking: torch.Tensor, parts: list[slice]) -> _ValueFit:
        heads, groups, dtype = heads_of(after, block), len(after.v), rough(block.x.device)
        every = logits_of(heads.part(slice(0, len(after.q))), parts)
        probabilities = [grouped(heads.probabilities(logits), groups).to(dtype) for logits in every]
        outputs = after.o.float().unflatten(1, (groups, -1)).to(dtype)
        fit = cls(heads.inputs.to(dtype), outputs, parts, probabilities, block.x.new_zeros(()))
        return replace(fit, wanted=fit._gradient([lacking[tokens].to(dtype) for tokens in parts]))

    def curvature(self, change: torch.Tensor) -> torch.Tensor:
        """As of `Fit`, `[G, D, E]`."""
        values, made = self.x @ change.mT.to(self.x.dtype), []
        for tokens, probabilities in zip(self.spans, self.probabilities, strict=True):
            read = (probabilities @ values[:, : tokens.stop]).unflatten(1, (self.outputs.shape[2], -1))  # [G, n, t, D]
            made.append(read.permute(2, 0, 1, 3).flatten(1) @ self.outputs.flatten(1).T)
        return self._gradient(made)

    def _gradient(self, pulls: list[torch.Tensor]) -> torch.Tensor:
        """`[G, D, E]`, by W_V, of the sum over all outputs, each times its pull `[t, E]`."""
        shape = self.outputs.shape[1], len(self.x), self.outputs.shape[-1]
        of_values = self.x.new_zeros(shape, dtype=torch.float32)  # a sum of many parts
        for tokens, probabilities, pull in zip(self.spans, self.probabilities, pulls, strict=True):
            of_heads = (pull @ self.outputs.flatten(1)).unflatten(-1, self.outputs.shape[1:])  # [t, G, n, D]
            of_values[:, : tokens.stop] += probabilities.mT @ of_heads.permute(1, 2, 0, 3).flatten(1, 2)
        return (of_values.to(self.x.dtype).mT @ self.x).float()
