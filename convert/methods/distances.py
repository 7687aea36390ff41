"""How far back heads look, over contexts that may be longer than the blocks in which that was measured.

A choice of rotary keys holds for the distances that it was made for, and may fail beyond them: a key that stands for several
frequencies is fitted to them there and nowhere else. So distances are those of the context that the result is for.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from convert.methods.text import ASSUMED_CONTEXT

_SURE = 3 / 4  # of the block: few queries of a block look farther back
_LEAST = 16  # tokens of a block, of which a tail can be told
_BINS = 4  # of distances, between which the tail's power is fitted
_STEEPEST = 6.0  # power of a tail


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


def assumed_mass(heads: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Without text, attention is assumed to fall off as one over the distance, up to the window if there is one."""
    context = min(ASSUMED_CONTEXT, window or ASSUMED_CONTEXT)
    falling = 1 / (1 + torch.arange(context, dtype=torch.float64, device=device))
    return (falling / falling.sum()).expand(heads, -1)


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
