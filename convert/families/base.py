"""The canonical record of one attention layer, and what a family has to know to read and write it.

A family knows where Q, K, V and O live in a checkpoint; nothing else in this project does. It knows no method and
no target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attention.qk_norm import QKNorm
from attention.rope import Rotary
from attention.spec import AttentionSpec


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


class Family(Protocol):
    """How one model type keeps its attention. `join(split(x)) == x`, bit for bit."""

    @property
    def model_type(self) -> str:
        """As in config.json."""

    @property
    def layout(self) -> str:
        """How the projections lie in the file, for people: "separate projections"."""

    def spec(self, config: Any) -> AttentionSpec:
        """The numbers of `config`'s attention."""

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of the layer's attention, by its name in the checkpoint, and its shape."""

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Attention:
        """The record of a layer, as views of `tensors` (the names of `shapes`)."""

    def join(self, attention: Attention, layer: int) -> dict[str, torch.Tensor]:
        """The inverse of `split`, for any number of KV heads."""

    def merges_norm_gains(self, config: Any) -> bool:
        """Whether keys are normalised with gains that differ per head, so that merging heads is inexact."""

    def describe(self, config: Any) -> dict[str, Any]:
        """What `convert inspect` says of a config, read without weights: biases, QK-norm, rotary, peculiarities."""
