"""The records that pass between families, methods and hosts: one layer's attention before and after, and its statistics.

Letters as in `attention`: E model width, H query heads, G KV heads, D head dim, R latent rank, P rotary dims of MLA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attention.qk_norm import QKNorm
from attention.rope import Rotary

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Attention:
    """One layer's attention, whatever its checkpoint looked like. Tensors keep the checkpoint's dtype.

    Attributes:
        q: `[H, D, E]`; query head h reads KV head h // (H / G).
        k: `[G, D, E]`.
        v: `[G, D, E]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by before the softmax.
        rotary: How heads turn with position, or None in a layer without positions.
        q_bias: `[H, D]` or None.
        k_bias: `[G, D]` or None.
        v_bias: `[G, D]` or None.
        o_bias: `[E]` or None.
        q_norm: QK-norm of the queries, or None.
        k_norm: QK-norm of the keys, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    scale: float
    rotary: Rotary | None = None
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: QKNorm | None = None
    k_norm: QKNorm | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True)
class FactoredAttention:
    """One layer's multi-head latent attention, as `attention.reference.latent_attention` computes it.

    Attributes:
        q_nope: `[H, D, E]`, queries of keys that do not turn.
        q_rope: `[H, P, E]`, queries of the key that turns.
        k_rope: `[P, E]`, that key, one for all heads.
        down: `[R, E]`, what is kept of a token; R counts no channels that a host adds.
        up_k: `[H, D, R]`.
        up_v: `[H, D, R]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by before the softmax.
        rotary: How the P dims turn.
        q_nope_bias: `[H, D]` or None.
        q_rope_bias: `[H, P]` or None.
        k_rope_bias: `[P]` or None.
        o_bias: `[E]` or None.
    """

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    k_rope: torch.Tensor
    down: torch.Tensor
    up_k: torch.Tensor
    up_v: torch.Tensor
    o: torch.Tensor
    scale: float
    rotary: Rotary
    q_nope_bias: torch.Tensor | None = None
    q_rope_bias: torch.Tensor | None = None
    k_rope_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None


Record = Attention | FactoredAttention
