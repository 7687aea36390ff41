"""Naive grouped and latent attention in the precision of its arguments: the oracle of every test, slow and obviously right.

Classes of transformers compute the same (tests/convert/families/test_contract.py).
"""

import math

import torch

from attention.encoding import rounded
from attention.qk_norm import QKNorm
from attention.record import Attention, FactoredAttention, Scoring


def grouped_attention(x: torch.Tensor, a: Attention, start: int = 0) -> torch.Tensor:
    """Causal self-attention over one full sequence: softmax(scale · q kᵀ, sink) (v, 0), projected by `o`.

    Args:
        x: `[B, T, E]`, the normalised input of the block.
        a: The attention, whose tensors have the dtype of x.
        start: The position of the first token.

    Returns:
        `[B, T, E]`.
    """
    read, x = (x, x) if a.projections is None else a.projections(x)
    queries, keys, values = _projected(read, a.q, a.q_bias), _projected(x, a.k, a.k_bias), _projected(x, a.v, a.v_bias)
    positions = start + torch.arange(x.shape[1], device=x.device)

    def encode(states: torch.Tensor, norm: QKNorm | None) -> torch.Tensor:
        if norm and not norm.form.after_rotary:
            states = norm(states)
        if a.rotary:
            states = a.rotary.rotation(positions, states.dtype)(states)
        return norm(states) if norm and norm.form.after_rotary else states

    repeats = a.q.shape[0] // a.k.shape[0]
    queries, keys = encode(queries, a.q_norm), encode(keys, a.k_norm)
    if a.rounding is not None:
        keys, values = rounded(keys, a.rounding, "keys"), rounded(values, a.rounding, "values")
    keys = keys.repeat_interleave(repeats, 1)
    weights = _attention(torch.einsum("bhtd,bhsd->bhts", queries, keys) * a.scale, a.scoring, a.sinks)
    context = torch.einsum("bhts,bhsd->bhtd", weights, values.repeat_interleave(repeats, 1))
    out = torch.einsum("bhtd,ehd->bte", context, a.o)
    return out if a.o_bias is None else out + a.o_bias


def latent_attention(x: torch.Tensor, a: FactoredAttention, start: int = 0) -> torch.Tensor:
    """Causal multi-head latent attention over one full sequence (DeepSeek-V2, arXiv 2405.04434).

    The latent of token s is c_s = down x_s, divided by its norm only where the record says so; head h scores it with q_nopeᵀ
    up_k c_s plus the rotated q_ropeᵀ k_rope, and reads up_v c_s.

    Args:
        x: `[B, T, E]`, the normalised input of the block.
        a: The attention, whose tensors have the dtype of x.
        start: The position of the first token.

    Returns:
        `[B, T, E]`.
    """
    rotate = a.rotary.rotation(start + torch.arange(x.shape[1], device=x.device), x.dtype)
    read, x = (x, x) if a.projections is None else a.projections(x)
    read = read if a.q_down is None else read @ a.q_down.T
    key = _projected(x, a.k_rope[None], None if a.k_rope_bias is None else a.k_rope_bias[None])
    key, latent = rotate(key)[:, 0], torch.einsum("bse,re->bsr", x, a.down)
    if a.normalised:
        latent = latent / torch.linalg.vector_norm(latent, dim=-1, keepdim=True).clamp_min(1e-30)
    latent = latent if a.gain is None else latent * a.gain
    if a.rounding is not None:
        key, latent = rounded(key, a.rounding, "rope"), rounded(latent, a.rounding, "latent")
    rope = torch.einsum("bhtp,bsp->bhts", rotate(_projected(read, a.q_rope, a.q_rope_bias)), key)
    keys = torch.einsum("hdr,bsr->bhsd", a.up_k, latent)
    nope = torch.einsum("bhtd,bhsd->bhts", _projected(read, a.q_nope, a.q_nope_bias), keys)
    weights = _attention((nope + rope) * a.scale, a.scoring)
    context = torch.einsum("bhts,bhsd->bhtd", weights, torch.einsum("hdr,bsr->bhsd", a.up_v, latent))
    out = torch.einsum("bhtd,ehd->bte", context, a.o)
    return out if a.o_bias is None else out + a.o_bias


def _projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[B, heads, T, D]` of `x [B, T, E]`, or of what each head reads, `[B, heads, T, E]`."""
    states = torch.einsum("bte,hde->bhtd" if x.ndim == 3 else "bhte,hde->bhtd", x, weight)
    return states if bias is None else states + bias[:, None]


def _attention(scores: torch.Tensor, scoring: Scoring, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Of scaled logits `[B, H, T, T]`: token t sees tokens 0 to t, or those of them within a window.

    Sinks `[H]` are further logits, which see to it that rows sum to less than one.
    """
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    positions = torch.arange(scores.shape[-1], device=scores.device)
    if scoring.slopes is not None:
        scores = scores + scores.new_tensor(scoring.slopes)[:, None, None] * positions
    distance = positions[:, None] - positions
    hidden = distance < 0
    if scoring.window is not None:
        hidden = hidden | (distance >= scoring.window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
