"""Naive grouped attention, spelled out in whatever precision its arguments have: the oracle of every test.

It is slow and obviously right; nothing but tests and checks should call it.
"""

from __future__ import annotations

import math

import torch

from attention.qk_norm import QKNorm
from attention.rope import Rotary


def grouped_attention(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    *,
    scale: float,
    rotary: Rotary | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    v_bias: torch.Tensor | None = None,
    o_bias: torch.Tensor | None = None,
    q_norm: QKNorm | None = None,
    k_norm: QKNorm | None = None,
) -> torch.Tensor:
    """Causal self-attention over one full sequence: softmax(scale · q kᵀ) v, projected by `o`.

    Args:
        x: `[B, T, E]`, the normalised input of the block, positions 0 to T−1.
        q: `[H, D, E]`; query head h reads KV head h // (H / G).
        k: `[G, D, E]`.
        v: `[G, D, E]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by.
        rotary: How queries and keys turn, or None.
        q_bias: `[H, D]` or None.
        k_bias: `[G, D]` or None.
        v_bias: `[G, D]` or None.
        o_bias: `[E]` or None.
        q_norm: Normalisation of queries, or None.
        k_norm: Normalisation of keys, or None.

    Returns:
        `[B, T, E]`.
    """

    def project(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        states = torch.einsum("bte,hde->bhtd", x, weight)
        return states if bias is None else states + bias[:, None]

    queries, keys, values = project(q, q_bias), project(k, k_bias), project(v, v_bias)
    positions = torch.arange(x.shape[1], device=x.device)

    def place(states: torch.Tensor, norm: QKNorm | None) -> torch.Tensor:
        if norm and not norm.after_rotary:
            states = norm(states)
        if rotary:
            states = rotary.rotate(states, positions)
        return norm(states) if norm and norm.after_rotary else states

    share = q.shape[0] // k.shape[0]
    queries, keys = place(queries, q_norm), place(keys, k_norm).repeat_interleave(share, 1)
    scores = torch.einsum("bhtd,bhsd->bhts", queries, keys) * scale
    future = positions[None, :] > positions[:, None]
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    context = torch.einsum("bhts,bhsd->bhtd", weights, values.repeat_interleave(share, 1))
    out = torch.einsum("bhtd,ehd->bte", context, o)
    return out if o_bias is None else out + o_bias
