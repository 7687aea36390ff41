"""How far a converted layer is from its source, by weights alone: what conversion.json says of each layer."""

from __future__ import annotations

import torch

from convert.record import Attention, FactoredAttention


def layer_errors(before: Attention, after: Attention | FactoredAttention) -> dict[str, float]:
    """Relative squared errors.

    For merged heads, `k_error` and `v_error`: distance of each source head from the one that replaces it. For a latent,
    `v_error` likewise, and `score_error`: distance of each head's bilinear score form W_Qᵀ W_K at distance 0, where nothing
    has turned (it does not see what not turning costs).
    """
    if isinstance(after, FactoredAttention):
        return _latent_errors(before, after)
    return {"k_error": _head_error(before.k, after.k), "v_error": _head_error(before.v, after.v)}


def _head_error(before: torch.Tensor, after: torch.Tensor) -> float:
    if after is before:
        return 0.0
    distance = own = 0.0
    for heads, shared in zip(before.unflatten(0, (after.shape[0], -1)), after.float(), strict=True):
        members = heads.float()  # group by group: what is copied to fp32 stays small
        own += _square(members)
        distance += _square(members - shared)
    return distance / own if own else 0.0


def _latent_errors(before: Attention, after: FactoredAttention) -> dict[str, float]:
    share = before.q.shape[0] // before.num_kv_heads
    turning = torch.ones(before.k.shape[1], device=before.k.device)
    if before.rotary is not None:
        turning[: before.rotary.dims] *= before.rotary.attention_factor**2
    sums = {"score": 0.0, "own_score": 0.0, "v": 0.0, "own_v": 0.0}
    for head in range(before.q.shape[0]):
        q, k, v = before.q[head].float(), before.k[head // share].float(), before.v[head // share].float()
        k = k * turning[:, None]
        queries = torch.cat((q, after.q_nope[head], after.q_rope[head]))
        keys = torch.cat((k, -after.up_k[head] @ after.down, -after.k_rope))
        sums["own_score"] += _form(q, k)
        sums["score"] += _form(queries, keys)
        sums["own_v"] += _square(v)
        sums["v"] += _square(v - after.up_v[head] @ after.down)
    return {
        "score_error": max(0.0, sums["score"]) / sums["own_score"] if sums["own_score"] else 0.0,
        "v_error": sums["v"] / sums["own_v"] if sums["own_v"] else 0.0,
    }


def _form(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖aᵀ b‖² of `[n, E]` each, without making the `[E, E]` matrix."""
    a, b = a.double(), b.double()  # squares of squares leave the range of fp32 early
    return float(((a @ a.T) * (b @ b.T)).sum())


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2)
