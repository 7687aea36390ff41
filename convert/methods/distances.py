"""How far back heads look, in contexts that may be longer than the blocks measured, and what RoPE does over these distances.

A choice of rotary keys holds for the distances that it was made for, and may fail beyond them: a key that stands for several
frequencies is fitted to them there and nowhere else. So distances are those of the context that the result is for.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from attention.forward import attention_by_distance
from attention.record import Attention
from attention.rope import Rotary
from convert.methods.latent import rotary_of
from convert.methods.statistics import Statistics, excerpt
from convert.methods.text import ASSUMED_CONTEXT

_SURE = 3 / 4  # of the block: few queries of a block look farther back
_LEAST = 16  # tokens of a block, of which a tail can be told
_BINS = 4  # of distances, between which the tail's power is fitted
_STEEPEST = 6.0  # power of a tail


def mass_of(attention: Attention, statistics: Statistics) -> torch.Tensor:
    """`[H, N]` attention by distance, measured on the sample; without text, one over the distance up to the window."""
    window = attention.scoring.window
    if statistics.sample is None:
        context = min(ASSUMED_CONTEXT, window or ASSUMED_CONTEXT)
        falling = 1 / (1 + torch.arange(context, dtype=torch.float64, device=attention.k.device))
        return (falling / falling.sum()).expand(len(attention.q), -1)
    near = attention_by_distance(attention, excerpt(statistics.sample).blocks)
    context = statistics.context or statistics.sample.context
    return mass(near, min(context, window or context))


def mass(near: torch.Tensor, context: int) -> torch.Tensor:
    """The share of each head's attention at distances 0 … N − 1, for queries at all positions of a context of N; fp64.

    Args:
        near: `[H, T]`, the attention to the token that far back where there is one (`attention.forward.attention_by_distance`).
        context: N.

    Returns:
        `[H, N]`; rows sum to one. A query sees the tokens behind it in proportion to `near`, whose tail goes on beyond T by its
        own power law.
    """
    total = near.sum(1, keepdim=True)
    itself = torch.nn.functional.one_hot(torch.zeros(len(near), dtype=torch.long, device=near.device), near.shape[1])
    near = torch.where(total > 0, near / total, itself.to(near))  # or all attention is on the first token
    whole = (near if context <= near.shape[1] else _extended(near, context))[:, :context]
    seen = whole.cumsum(1)
    weight = torch.where(seen > 0, 1 / seen, 0).flip(1).cumsum(1).flip(1)  # Σ_{t ≥ d} 1 / Σ_{d' ≤ t} near_d'
    shares = whole * weight
    return shares / shares.sum(1, keepdim=True)


def _extended(near: torch.Tensor, context: int) -> torch.Tensor:
    """`near` up to three quarters of the block, and from there on the power law of the half before."""
    length = near.shape[1]
    if length < _LEAST:
        return torch.nn.functional.pad(near, (0, context - length))
    start, end = length // 4, int(_SURE * length)
    edges = torch.linspace(start, end, _BINS + 1).long().tolist()
    bins = torch.stack([near[:, a:b].mean(1) for a, b in pairwise(edges)], 1).clamp_min(torch.finfo(near.dtype).tiny).log()
    far = torch.tensor([(a + b - 1) / 2 for a, b in pairwise(edges)], dtype=near.dtype, device=near.device).log()
    off = far - far.mean()
    slope = ((bins * off).sum(1) / off.square().sum()).clamp(-_STEEPEST, 0)[:, None]
    beyond = torch.arange(end, context, dtype=near.dtype, device=near.device).log() - far.mean()
    return torch.cat((near[:, :end], (bins.mean(1, keepdim=True) + slope * beyond).exp()), 1)


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
