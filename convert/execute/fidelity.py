"""The distance of a converted layer from its source by weights alone, for conversion.json."""

from __future__ import annotations

import torch

from attention.record import Attention, FactoredAttention, Record


def layer_errors(before: Attention, after: Record) -> dict[str, float]:
    """Relative squared errors of a converted layer, by name.

    If queries are unchanged: `k_error` and `v_error`, the distance of each source head from its replacement. If they
    change too: `score_error`, the distance of each head's bilinear form W_Qᵀ W_K (of normalised queries and keys, if those are
    read) at distance 0, where RoPE has no effect
    (so it ignores the cost of not rotating), and `output_error`, that of each head's W_O W_V. By weights alone: a fit
    to text may be farther by these figures and yet closer on the text.
    """
    if isinstance(after, Attention) and after.q is before.q:
        return {"k_error": _head_error(before.k, after.k), "v_error": _head_error(before.v, after.v)}
    sums = [0.0] * 4
    for head in range(before.q.shape[0]):
        q, k, o, v = _maps(before, head)
        new_q, new_k, new_o, new_v = _maps(after, head)
        sums[0] += _form(torch.cat((q, new_q)), torch.cat((k, -new_k)))
        sums[1] += _form(q, k)
        sums[2] += _form(torch.cat((o, new_o)), torch.cat((v, -new_v)))
        sums[3] += _form(o, v)
    return {"score_error": _ratio(sums[0], sums[1]), "output_error": _ratio(sums[2], sums[3])}


def _head_error(before: torch.Tensor, after: torch.Tensor) -> float:
    if after is before:
        return 0.0
    distance = own = 0.0
    for heads, shared in zip(before.unflatten(0, (after.shape[0], -1)), after.float(), strict=True):
        members = heads.float()  # group by group, so that the fp32 copy stays small
        own += _square(members)
        distance += _square(members - shared)
    return _ratio(distance, own)


def _maps(a: Record, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One head's queries and keys `[n, E]`, outputs and values `[m, E]`; its bilinear forms are qᵀ k and oᵀ v."""
    if isinstance(a, FactoredAttention):
        down = a.down if a.gain is None else a.down * a.gain[:, None]  # a norm of the latent is nearly one
        keys = torch.cat((a.up_k[head] @ down, a.k_rope))
        queries = torch.cat((a.q_nope[head], a.q_rope[head]))
        queries = queries if a.q_down is None else queries @ a.q_down
        return queries, keys, a.o[:, head].T, a.up_v[head] @ down
    group = head // (a.q.shape[0] // a.num_kv_heads)
    keys = a.k[group].float()
    if a.rotary is not None:
        factor = torch.ones_like(keys[:, :1])
        factor[: a.rotary.dims] = a.rotary.attention_factor**2
        keys = keys * factor
    return a.q[head].float(), keys, a.o[:, head].float().T, a.v[group].float()


def _form(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖aᵀ b‖² for a, b of `[n, E]`, without the `[E, E]` matrix."""
    a, b = a.double(), b.double()  # fourth powers overflow fp32 early
    return float(((a @ a.T) * (b @ b.T)).sum())


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2)


def _ratio(distance: float, own: float) -> float:
    return max(0.0, distance) / own if own else 0.0
