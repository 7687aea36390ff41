"""`aligned`: heads of a group are turned towards each other before they are merged, and queries and outputs turn back.

Keys: RoPE multiplies number l of each head by e^{iθ_l t}, so a complex factor per head and frequency commutes with it and can
be absorbed into the queries. Per group and frequency, with λ_g² = Σ |q_h|² over the query heads of KV head g, the shared key is
u^H Λ Z for the top eigenvector u of Λ Z Z^H Λ, and head h's query absorbs conj(u_g) / λ_g: the best rank-1 fit of the logits
if queries, keys and frequencies were independent and inputs white. Dims that do not turn: the stacked M_g^½ K_g, truncated to
N dims by SVD. Values: the stacked (Σ_h O_hᵀ O_h)^½ V_g, truncated to D; W_O absorbs the rest. Biases ride along as a column.

A norm of queries and keys forbids absorption: there the shared key is the mean of the heads, brought to one length and sign,
which queries follow; one norm over all heads allows not even that, and keys are averaged as they are.

Weights alone are looked at. Cost per layer and group of n heads: D/2 eigendecompositions of n × n, one or two of
min(n D, E) squared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from convert.methods.grouped import Draw, GroupedMethod, merged_norm
from convert.methods.latent import leading_subspace
from convert.record import Attention


def merge(attention: Attention, groups: int, draw: Draw) -> Attention:
    """K̂, V̂ with `groups` heads, and queries and output columns that fit them; fp32. Heads that are alike merge without loss."""
    a = attention
    share = a.q.shape[0] // a.num_kv_heads
    q, k = _augmented(a.q, a.q_bias).unflatten(0, (groups, -1, share)), _augmented(a.k, a.k_bias).unflatten(0, (groups, -1))
    v = _augmented(a.v, a.v_bias).unflatten(0, (groups, -1))
    o = a.o.float().permute(1, 0, 2).unflatten(0, (groups, -1, share))  # [groups, n, share, E, D]
    keys = [_shared_key(a, *part) for part in zip(q, k, strict=True)]
    values = [_shared_value(*part) for part in zip(v, o, strict=True)]
    merged_q = torch.stack([queries for queries, _ in keys]).flatten(0, 2)
    merged_k, merged_v = torch.stack([key for _, key in keys]), torch.stack([value for value, _ in values])
    merged_o = torch.stack([outputs for _, outputs in values]).flatten(0, 2).permute(1, 0, 2)
    return replace(
        a,
        q=merged_q[..., :-1],
        k=merged_k[..., :-1],
        v=merged_v[..., :-1],
        o=merged_o,
        q_bias=None if a.q_bias is None else merged_q[..., -1],
        k_bias=None if a.k_bias is None else merged_k[..., -1],
        v_bias=None if a.v_bias is None else merged_v[..., -1],
        k_norm=merged_norm(a.k_norm, lambda rows: rows.float().unflatten(0, (groups, -1)).mean(1)),
    )


def _augmented(rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[heads, D, E + 1]`: the bias as the weight of a constant input."""
    rows = rows.float()
    return torch.cat((rows, torch.zeros_like(rows[..., :1]) if bias is None else bias.float()[..., None]), -1)


def _shared_key(a: Attention, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[n, share, D, E + 1]` and the one key `[D, E + 1]` of a group, from `q [n, share, D, …]` and `k [n, D, …]`."""
    if a.k_norm is not None:
        return _shared_normalised_key(a, q, k)
    turning = a.rotary.dims if a.rotary else 0
    parts = []
    if a.rotary and turning:
        parts.append(_turning(a, q[:, :, :turning], k[:, :turning]))
    if turning < k.shape[1]:
        parts.append(_still(q[:, :, turning:], k[:, turning:]))
    queries, keys = zip(*parts, strict=True)
    return torch.cat(queries, 2), torch.cat(keys)


def _turning(a: Attention, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert a.rotary is not None
    z, _ = a.rotary.to_complex(k)  # [n, P/2, E + 1]
    w, _ = a.rotary.to_complex(q.flatten(0, 1))
    w = w.unflatten(0, q.shape[:2])  # [n, share, P/2, E + 1]
    weight = w.abs().square().sum((1, 3)).sqrt().double()  # λ, [n, P/2]
    weight = _floored(weight, 1e-6)
    weighted = (z * weight[..., None]).transpose(0, 1)  # [P/2, n, E + 1], complex128
    u = torch.linalg.eigh(weighted @ weighted.mH).eigenvectors[..., -1]  # [P/2, n]
    key = (u.conj()[:, None] @ weighted)[:, 0]  # [P/2, E + 1]
    factor = u.T / weight  # z_g ≈ factor_g · key
    # The key as large as its heads are on average, so that neither side leaves the range of a half float.
    size = factor.abs().square().mean(0).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    key, factor = key * size[:, None], factor / size
    queries = w * factor.conj()[:, None, :, None].to(w.dtype)
    return (
        a.rotary.from_complex(queries.flatten(0, 1)).unflatten(0, q.shape[:2]).float(),
        a.rotary.from_complex(key[None])[0].float(),
    )


def _still(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = q.transpose(1, 2).flatten(2)  # [n, N, share (E + 1)]
    key, back = _joint(k, flat @ flat.mT)
    return back.mT[:, None] @ q, key


def _shared_value(v: torch.Tensor, o: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The one value `[D, E + 1]` and output columns `[n, share, E, D]`, from `v [n, D, E + 1]` and `o [n, share, E, D]`."""
    columns = o.flatten(1, 2)  # [n, share E, D]
    value, back = _joint(v, columns.mT @ columns)
    return value, o @ back[:, None]


def _joint(rows: torch.Tensor, gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best N shared rows for n heads, each weighted by the root of its `gram [n, N, N]`.

    Returns:
        Shared rows `[N, E]`, and `back [n, N, N]`: rows of head g ≈ back_g @ shared.
    """
    values, vectors = torch.linalg.eigh(gram.double())
    values = _floored(values, 1e-12).sqrt()
    root, inverse = (vectors * values[:, None]) @ vectors.mT, (vectors / values[:, None]) @ vectors.mT
    stacked = (root @ rows.double()).flatten(0, 1)  # [n N, E]
    left = leading_subspace(stacked, None, min(rows.shape[1], *stacked.shape)).double()
    left = torch.nn.functional.pad(left, (0, rows.shape[1] - left.shape[1]))  # a model narrower than its heads
    shared = left.T @ stacked
    back = inverse @ left.unflatten(0, rows.shape[:2])
    return shared.float(), back.float()


def _floored(weights: torch.Tensor, share: float) -> torch.Tensor:
    """Weights of which none is below a share of the largest, to be divided by; ones where all are zero."""
    largest = weights.max()
    return weights.clamp_min(share * largest) if largest > 0 else torch.ones_like(weights)


def _shared_normalised_key(a: Attention, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert a.k_norm is not None
    if a.k_norm.scope == "all" or a.k_norm.bias is not None:
        return q, k.mean(0)
    lengths = torch.linalg.vector_norm(k, dim=(1, 2), keepdim=True)
    unit = k / lengths.clamp_min(torch.finfo(torch.float32).tiny)
    signs = torch.where(torch.einsum("nde,de->n", unit, unit[0]) < 0, -1.0, 1.0)
    return q * signs[:, None, None, None], (unit * signs[:, None, None]).mean(0) * lengths.mean()


METHOD = GroupedMethod("aligned", "heads turned towards each other, by weights alone", "", True, merge)
