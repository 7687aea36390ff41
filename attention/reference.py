"""Naive grouped and latent attention in the precision of its arguments: the oracle of every test.

It is slow and obviously right; nothing but tests and checks should call it.
"""

from __future__ import annotations

import math

import torch

from attention.encoding import rounded
from attention.formats import Format
from attention.qk_norm import QKNorm
from attention.record import LatentProjections, Projections
from attention.rope import Rotary
from attention.scoring import PLAIN, Scoring


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
    projections: Projections | None = None,
    scoring: Scoring = PLAIN,
    rounding: Format | None = None,
) -> torch.Tensor:
    """Causal self-attention over one full sequence: softmax(scale · q kᵀ) v, projected by `o`.

    Args:
        x: `[B, T, E]`, the normalised input of the block, positions 0 to T−1.
        q: `[H, D, E]`; query head h reads KV head h // (H / G).
        k: `[G, D, E]`.
        v: `[G, D, E]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by.
        rotary: How queries and keys rotate with position, or None.
        q_bias: `[H, D]` or None.
        k_bias: `[G, D]` or None.
        v_bias: `[G, D]` or None.
        o_bias: `[E]` or None.
        q_norm: Normalisation of queries, or None.
        k_norm: Normalisation of keys, or None.
        projections: Queries, keys and values of the input, which take its place. E is then D for `q`, whose heads read their
            own queries, and 2 G D for `k` and `v`, which read keys and values side by side, or R + P, a latent and a RoPE key.
        scoring: What becomes of scaled logits: ALiBi, a window, a cap.
        rounding: The format that keys and values are cached in, or None.

    Returns:
        `[B, T, E]`.
    """
    read, x = _read(x, q.shape[0], projections)
    queries, keys, values = _of_heads(read, q, q_bias), _projected(x, k, k_bias), _projected(x, v, v_bias)
    positions = torch.arange(x.shape[1], device=x.device)

    def encode(states: torch.Tensor, norm: QKNorm | None) -> torch.Tensor:
        if norm and not norm.after_rotary:
            states = norm(states)
        if rotary:
            states = rotary.rotate(states, positions)
        return norm(states) if norm and norm.after_rotary else states

    repeats = q.shape[0] // k.shape[0]
    queries, keys = encode(queries, q_norm), encode(keys, k_norm)
    if rounding is not None:
        keys, values = rounded(keys, rounding, "keys"), rounded(values, rounding, "values")
    keys = keys.repeat_interleave(repeats, 1)
    weights = _attention(torch.einsum("bhtd,bhsd->bhts", queries, keys) * scale, scoring)
    context = torch.einsum("bhts,bhsd->bhtd", weights, values.repeat_interleave(repeats, 1))
    out = torch.einsum("bhtd,ehd->bte", context, o)
    return out if o_bias is None else out + o_bias


def latent_attention(
    x: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    down: torch.Tensor,
    up_k: torch.Tensor,
    up_v: torch.Tensor,
    o: torch.Tensor,
    *,
    scale: float,
    rotary: Rotary,
    q_nope_bias: torch.Tensor | None = None,
    q_rope_bias: torch.Tensor | None = None,
    k_rope_bias: torch.Tensor | None = None,
    o_bias: torch.Tensor | None = None,
    projections: Projections | None = None,
    scoring: Scoring = PLAIN,
    q_down: torch.Tensor | None = None,
    normalised: bool = False,
    rounding: Format | None = None,
    gain: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal multi-head latent attention over one full sequence (DeepSeek-V2, arXiv 2405.04434), without a latent norm.

    The latent of token s is c_s = down x_s; head h scores it with q_nopeᵀ up_k c_s plus the rotated q_ropeᵀ k_rope, and
    reads up_v c_s.

    Args:
        x: `[B, T, E]`, the normalised input of the block, positions 0 to T−1.
        q_nope: `[H, D, E]`.
        q_rope: `[H, P, E]`.
        k_rope: `[P, E]`, the rotary key that all heads share.
        down: `[R, E]`.
        up_k: `[H, D, R]`.
        up_v: `[H, D, R]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by.
        rotary: How the P dims rotate with position.
        q_nope_bias: `[H, D]` or None.
        q_rope_bias: `[H, P]` or None.
        k_rope_bias: `[P]` or None.
        o_bias: `[E]` or None.
        projections: As in `grouped_attention`: E is then D for `q_nope` and `q_rope`, and 2 G D for `k_rope` and `down`.
        scoring: As in `grouped_attention`.
        q_down: `[Q, E]`, makes the latent that queries read, or None: E is then Q for `q_nope` and `q_rope`.
        normalised: Whether the latent is divided by its norm.
        rounding: The format that the latent and the RoPE key are cached in, or None.
        gain: `[R]`, what it is then multiplied by, or None.

    Returns:
        `[B, T, E]`.
    """
    positions = torch.arange(x.shape[1], device=x.device)
    read, x = _read(x, o.shape[1], projections)
    read = read if q_down is None else torch.einsum("bhte,qe->bhtq", read, q_down)
    key = _projected(x, k_rope[None], None if k_rope_bias is None else k_rope_bias[None])
    key, latent = rotary.rotate(key, positions)[:, 0], torch.einsum("bse,re->bsr", x, down)
    if normalised:
        latent = latent / torch.linalg.vector_norm(latent, dim=-1, keepdim=True).clamp_min(1e-30)
    latent = latent if gain is None else latent * gain
    if rounding is not None:
        key, latent = (rounded(part, rounding, "latent") for part in (key, latent))
    rope = torch.einsum("bhtp,bsp->bhts", rotary.rotate(_of_heads(read, q_rope, q_rope_bias), positions), key)
    nope = torch.einsum("bhtd,hdr,bsr->bhts", _of_heads(read, q_nope, q_nope_bias), up_k, latent)
    weights = _attention((nope + rope) * scale, scoring)
    context = torch.einsum("bhts,hdr,bsr->bhtd", weights, up_v, latent)
    out = torch.einsum("bhtd,ehd->bte", context, o)
    return out if o_bias is None else out + o_bias


def _projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[B, heads, T, D]` of `x [B, T, E]`."""
    states = torch.einsum("bte,hde->bhtd", x, weight)
    return states if bias is None else states + bias[:, None]


def _of_heads(read: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[B, heads, T, D]` of what each head reads, `[B, heads, T, E]`."""
    states = torch.einsum("bhte,hde->bhtd", read, weight)
    return states if bias is None else states + bias[:, None]


def _read(x: torch.Tensor, heads: int, projections: Projections | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of each head's queries `[B, H, T, E]`, and of keys and values `[B, T, E]`."""
    if projections is None:
        return x[:, None].expand(-1, heads, -1, -1), x
    p = projections
    if isinstance(p, LatentProjections):
        return _read_latent(x, p)
    queries, keys, values = _projected(x, p.q, p.q_bias), _projected(x, p.k, p.k_bias), _projected(x, p.v, p.v_bias)
    queries, keys = queries if p.q_norm is None else p.q_norm(queries), keys if p.k_norm is None else p.k_norm(keys)
    if p.clip is not None:
        queries, keys, values = (states.clamp(-p.clip, p.clip) for states in (queries, keys, values))
    both = [head for states in (keys, values) for head in states.unbind(1)]
    return queries, torch.cat(both, -1)


def _read_latent(x: torch.Tensor, p: LatentProjections) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a source with latent attention."""
    both = torch.einsum("bte,re->btr", x, p.kv)
    both = both if p.kv_bias is None else both + p.kv_bias
    latent, key = both[..., : p.rank], both[..., p.rank :]
    if p.q_down is not None and p.q_norm is not None:
        x = torch.einsum("bte,qe->btq", x, p.q_down)
        x = p.q_norm((x if p.q_down_bias is None else x + p.q_down_bias)[:, None])[:, 0]
    return torch.einsum("bte,hde->bhtd", x, p.q), torch.cat((p.kv_norm(latent[:, None])[:, 0], key), -1)


def _attention(scores: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Of scaled logits `[B, H, T, T]`: token t sees tokens 0 to t, or those of them within a window."""
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    positions = torch.arange(scores.shape[-1], device=scores.device)
    if scoring.slopes is not None:
        scores = scores + scores.new_tensor(scoring.slopes)[:, None, None] * positions
    distance = positions[:, None] - positions
    hidden = distance < 0
    if scoring.window is not None:
        hidden = hidden | (distance >= scoring.window)
    return scores.masked_fill(hidden, -math.inf).softmax(-1)
