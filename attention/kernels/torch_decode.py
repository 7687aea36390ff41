"""Attention over the cache in plain torch, with gradients: any device and dtype and, over a latent, any number of queries.

An encoded cache (`attention.cache`) is decoded a block of tokens at a time: a block is read by all queries of one new token,
and forgotten; no copy of the whole cache is made. Softmax is then online (arXiv 1805.02867): with m the highest score so far,
l = Σ e^(s - m) and o = Σ e^(s - m) v, a block whose highest score is m' > m first multiplies l and o by e^(m - m'). The mean is
o / l.

Letters as in `attention`; R is the rank of the latent, P its rotary dims.
"""

import torch

from attention.cache import Stored

_BLOCK = 4096  # tokens of a cache in half precision
# Values of a block of an encoded cache. On a CPU, it should stay in a core's L2 cache; on a GPU, launches should be few.
_VALUES = {"cpu": 2**18}
_MANY = 2**24
_FEWEST = 32  # tokens of a block


def decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """As `attention.kernels.decode`, over a `latent [B, S, R]` and a `k_rope [B, S, P]`, or `Stored` ones and one query."""
    if isinstance(latent, Stored) and isinstance(k_rope, Stored):
        rows = q_latent.transpose(1, 2), q_rope.transpose(1, 2)  # heads are queries of the one latent
        return _attend(rows, (latent, k_rope), latent, mask, scaling).transpose(1, 2)
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
    """As `attention.kernels.decode_grouped`: a group's heads become queries of its one KV head.

    By torch's own attention; over `Stored` keys and values, a query that sees no token is zero.
    """
    batch, heads, _, dim = query.shape
    groups = keys.shape[1]
    rows = query.reshape(batch, groups, -1, dim)
    if mask is not None and mask.shape[1] != 1:
        mask = mask.reshape(mask.shape[0], groups, -1, mask.shape[-1])
    if isinstance(keys, Stored) and isinstance(values, Stored):
        out = _attend((rows,), (keys,), values, mask, scaling)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, 1, -1)


def _attend(
    queries: tuple[torch.Tensor, ...], keys: tuple[Stored, ...], values: Stored, mask: torch.Tensor | None, scaling: float
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
    """Scores, with −∞ for tokens that are not seen; the least finite number of a mask stays finite, as in `probabilities`."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    least = torch.finfo(scores.dtype).min
    return (scores + mask.to(scores.dtype).clamp(min=least)).masked_fill(mask == -torch.inf, -torch.inf)


def _tokens(values: int, device: torch.device) -> int:
    """Tokens of a block, for so many values of one token."""
    return max(_FEWEST, _VALUES.get(device.type, _MANY) // values)
