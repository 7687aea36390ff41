"""Attention over the cache in plain torch, with gradients: any device and dtype and, over a latent, any number of queries.

Letters as in `attention`; R is the rank of the latent, P its rotary dims.
"""

from __future__ import annotations

import torch

_BLOCK = 4096


def decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """As `attention.kernels.decode`, over a `latent [B, S, R]` and a `k_rope [B, S, P]`."""
    mean = read(probabilities(q_latent, q_rope, latent, k_rope, mask, scaling), latent)
    if mask is None:
        return mean
    seen = mask if mask.dtype == torch.bool else mask > -torch.inf
    return mean.masked_fill(~seen.any(-1, keepdim=True), 0)


def probabilities(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """The probabilities of `decode`, `[B, H, T, S]` in the dtype of the queries; scores and softmax are at least fp32.

    With `softcap` c, scores become c · tanh(scores / c) (Gemma 2, arXiv 2408.00118) before they are masked.
    """
    wide = torch.promote_types(latent.dtype, torch.float32)
    # A product in half precision would round scores to 8 or 11 bits. Keys are widened one block of tokens at a time,
    # to avoid a second copy of the cache. Compiled code widens them whole: a loop over S would be unrolled again for each S.
    block = latent.shape[1] if latent.dtype == wide or torch.compiler.is_compiling() else _BLOCK
    rows, rotated = ((q.flatten(1, 2).to(wide) * scaling) for q in (q_latent, q_rope))  # heads and queries
    blocks = [
        torch.baddbmm(torch.bmm(rotated, k.to(wide).transpose(1, 2)), rows, c.to(wide).transpose(1, 2))
        for c, k in zip(latent.split(block, 1), k_rope.split(block, 1), strict=True)
    ]
    scores = torch.cat(blocks, -1) if len(blocks) > 1 else blocks[0]
    scores = scores.unflatten(1, q_latent.shape[1:3])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        least = torch.finfo(wide).min  # not −∞: a row that sees no token must not become NaN
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=wide).masked_fill(~mask, least)
        scores = scores + mask.to(wide).clamp(min=least)
    return scores.softmax(-1).to(q_latent.dtype)


def read(probabilities: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """`probabilities [B, H, T, S]` times `latent [B, S, R]` is `[B, H, T, R]`.

    Heads and queries are the rows of one product: broadcasting over heads would copy the latent H times.
    """
    return torch.bmm(probabilities.flatten(1, 2), latent).unflatten(1, probabilities.shape[1:3])


def decode_grouped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """As `attention.kernels.decode_grouped`, by torch's own attention: a group's heads become queries of its one KV head."""
    batch, heads, _, dim = query.shape
    groups = keys.shape[1]
    rows = query.reshape(batch, groups, -1, dim)
    if mask is not None and mask.shape[1] != 1:
        mask = mask.reshape(mask.shape[0], groups, -1, mask.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, 1, -1)
