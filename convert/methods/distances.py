"""How far back heads look, and what RoPE does over these distances.

What loses its rotation is fitted to the distances at which heads look, on rows that hold all that the result is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from attention.forward import Block, heads_of, spans
from attention.record import Attention
from attention.rope import Rotary
from convert.methods.latent import rotary_of
from convert.methods.statistics import Statistics
from convert.methods.text import ASSUMED_CONTEXT

_ALIKE = 16  # distances that differ by less than one part in so many count as one: few rows show each of them


def mass_of(attention: Attention, statistics: Statistics) -> torch.Tensor:
    """`[H, N]`, the share of each head's attention at distances 0 … N − 1, fp64; rows sum to one.

    Without text, it falls off as one over the distance up to the window.
    """
    if statistics.sample is None:
        context = min(ASSUMED_CONTEXT, attention.scoring.window or ASSUMED_CONTEXT)
        falling = 1 / (1 + torch.arange(context, dtype=torch.float64, device=attention.k.device))
        return (falling / falling.sum()).expand(len(attention.q), -1)
    total = _smoothed(attention_by_distance(attention, statistics.sample.blocks))
    total[:, 0] += total.sum(1) == 0  # all attention is on the first token
    return total / total.sum(1, keepdim=True)


def _smoothed(total: torch.Tensor) -> torch.Tensor:
    """Average `[H, N]` over distances that are nearly alike."""
    edges = [0]
    while edges[-1] < total.shape[1]:
        edges.append(edges[-1] + max(1, edges[-1] // _ALIKE))
    parts = total.split(torch.tensor([*edges[:-1], total.shape[1]]).diff().tolist(), 1)
    return torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in parts], 1)


def waves_at(rotary: Rotary, mass: torch.Tensor) -> torch.Tensor:
    """`[N, L]`, e^{iθ_l (s − t)} at each distance t − s."""
    distance = torch.arange(mass.shape[1], dtype=torch.float64, device=mass.device)
    angles = -distance[:, None] * rotary.frequencies_for(distance).to(distance)
    return torch.polar(torch.ones_like(angles), angles)


def rotated_moments(attention: Attention, keys: torch.Tensor, statistics: Statistics) -> torch.Tensor:
    """Rotary `keys [G, P, E + 1]` as complex numbers times Σ_l, the covariance of (x, 1) e^{iθ_l (s − t)} within a query's
    attention, `[G, L, E + 1]`.

    As if distances and inputs were independent, Σ_l = (1 − |φ_l|²) · `seen` + |φ_l|² · `within`: what does not vary within a
    query's attention cancels in the softmax as far as RoPE leaves it constant. |φ_l|² is averaged over heads.
    """
    rotary, attended, distances = rotary_of(attention), statistics.attended, mass_of(attention, statistics)
    waves = waves_at(rotary, distances)
    constant = (distances.to(waves.dtype) @ waves).abs().square().mean(0)[:, None]
    seen, within = (
        rotary.to_complex(keys @ moment)[0] for moment in (attended.seen_with_constant, attended.within_with_constant)
    )
    return (1 - constant) * seen + constant * within


def attention_by_distance(attention: Attention, blocks: Sequence[Block]) -> torch.Tensor:
    """How much attention each head pays to tokens t − s = 0 … N − 1 positions back, summed over queries, `[H, N]` fp64.

    The first token of a block is left out: many models rest much of their attention on it, however far back it is.

    Args:
        attention: The record.
        blocks: The largest of their positions is N − 1.
    """
    longest = max(block.positions[-1] for block in blocks) + 1
    total = torch.zeros(attention.q.shape[0], longest, dtype=torch.float64, device=blocks[0].x.device)
    for block in blocks:
        jumps = [token for token, (a, b) in enumerate(pairwise(block.positions), 1) if b != a + 1]
        parts = [range(a, b) for a, b in pairwise([0, *jumps, len(block.positions)])]  # within which positions do not skip
        heads = heads_of(attention, block.float())
        for tokens in [slice(part.start + own.start, part.start + own.stop) for part in parts for own in spans(len(part))]:
            keys = [slice(part.start, min(part.stop, tokens.stop)) for part in parts if part.start < tokens.stop]
            nearest = [block.positions[tokens.start] - block.positions[part.stop - 1] for part in keys]
            for head in range(len(total)):
                probabilities = heads.attention(head, tokens)
                probabilities[:, 0] = 0
                for part, first in zip(keys, nearest, strict=True):
                    sums, begin = _diagonals(probabilities[:, part]), max(first, 0)  # negative distances are of the future
                    total[head, begin : first + len(sums)] += sums[begin - first :]
    return total


def _diagonals(probabilities: torch.Tensor) -> torch.Tensor:
    """`[t + s − 1]` fp64: the sums of the diagonals of `[t, s]`, that of the first row and the last column first.

    They are columns of a skewed view: adding by index is not deterministic on CUDA.
    """
    t, s = probabilities.shape
    padded = torch.nn.functional.pad(probabilities.flip(-1), (0, t))
    skewed = padded.flatten()[: t * (s + t - 1)].view(t, s + t - 1)
    return skewed.sum(0, dtype=torch.float64)
