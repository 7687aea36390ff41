"""Attention of one new token over an encoded cache (`attention.stored`) in plain torch, a block of tokens at a time.

A block is decoded, read by all queries, and forgotten; no copy of the whole cache is made. Softmax is online (arXiv
1805.02867): with m the highest score so far, l = Σ e^(s - m) and o = Σ e^(s - m) v, a block whose highest score is m' > m
first multiplies l and o by e^(m - m'). The mean is o / l.
"""

from __future__ import annotations

import torch

from attention.stored import Stored

# Cached values of a block. On a CPU, a decoded block should stay in the L2 cache of a core; on a GPU, launches should be few.
_VALUES = {"cpu": 2**18}
_MANY = 2**24
_FEWEST = 32  # tokens of a block


def decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: Stored,
    k_rope: Stored,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """As `torch_decode.decode`, for one query per head, over `latent [B, 1, S, R]` and `k_rope [B, 1, S, P]`."""
    rows = q_latent.transpose(1, 2), q_rope.transpose(1, 2)  # heads are queries of the one latent
    return _attend(rows, (latent, k_rope), latent, mask, scaling).transpose(1, 2)


def decode_grouped(
    query: torch.Tensor, keys: Stored, values: Stored, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """As `torch_decode.decode_grouped`, but zero where a query sees no token."""
    batch, heads, _, dim = query.shape
    groups = keys.shape[1]
    if mask is not None and mask.shape[1] != 1:
        mask = mask.reshape(mask.shape[0], groups, -1, mask.shape[-1])
    out = _attend((query.reshape(batch, groups, -1, dim),), (keys,), values, mask, scaling)
    return out.reshape(batch, heads, 1, -1)


def _attend(
    queries: tuple[torch.Tensor, ...],
    keys: tuple[Stored, ...],
    values: Stored,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """The mean of `values [B, G, S, Dv]`, `[B, G, M, Dv]`, by the softmax of all products of `queries [B, G, M, …]` and `keys`.

    Keys that are `values` are decoded once. `mask` broadcasts to `[B, G, M, S]`.
    """
    batch, groups, cached, dims = values.shape
    rows, dtype = queries[0].shape[2], queries[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    scaled = [query.to(wide) * scaling for query in queries]
    top = torch.full((batch, groups, rows, 1), -torch.inf, dtype=wide, device=values.device)
    weight, total = torch.zeros_like(top), torch.zeros((batch, groups, rows, dims), dtype=wide, device=values.device)
    block = _tokens(batch * groups * max(dims, *(key.shape[3] for key in keys)), values.device)
    for start in range(0, cached, block):
        end = min(start + block, cached)
        read = values.cached.block(start, end, wide)
        parts = [
            query @ (read if key is values else key.cached.block(start, end, wide)).mT
            for query, key in zip(scaled, keys, strict=True)
        ]
        scores = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        scores = scores if mask is None else _masked(scores, mask[..., start:end])
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = higher.masked_fill(higher == -torch.inf, 0)  # −∞ − −∞ is NaN
        fade, p = (top - base).exp_(), (scores - base).exp_()
        weight = weight * fade + p.sum(-1, keepdim=True)
        total = total * fade + p @ read
        top = higher
    return (total / weight.masked_fill(weight == 0, 1)).to(dtype)


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores, with −∞ for tokens that are not seen; the least finite number of a mask stays finite, as in `torch_decode`."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    least = torch.finfo(scores.dtype).min
    return (scores + mask.to(scores.dtype).clamp(min=least)).masked_fill(mask == -torch.inf, -torch.inf)


def _tokens(values: int, device: torch.device) -> int:
    """Tokens of a block, for so many values of one token."""
    return max(_FEWEST, _VALUES.get(device.type, _MANY) // values)
