"""GPTBigCode (SantaCoder, StarCoder): one projection for queries, keys and values, with one KV head or as many as query heads.

Its class knows no other number of KV heads. With one, the rows of K and V follow those of all queries; otherwise those of each
head follow each other. Positions are learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.base import Family, Traits
from convert.families.separate import GPT2

if TYPE_CHECKING:
    import torch


class MultiQueryProjections(Family):
    """`c_attn [(H + 2) D, E]`, or without `multi_query` `c_attn [H 3 D, E]`, and `c_proj [E, H D]`, all with biases."""

    model_type = "gpt_bigcode"
    names = GPT2
    attention_path = "transformer.h.{layer}.attn"
    base = "transformer"
    layout = "stacked or interleaved projections"
    shares_heads = False

    def unreadable(self, config: Any) -> str | None:
        return "it has cross-attention (add_cross_attention)" if config.add_cross_attention else None

    def class_kv_heads(self, config: Any) -> int:
        return 1 if config.multi_query else super().class_kv_heads(config)

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        spec, width = self.spec(config), config.hidden_size
        rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "c_attn.weight": (rows, width),
            "c_attn.bias": (rows,),
            "c_proj.weight": (width, width),
            "c_proj.bias": (width,),
        }
        return {f"{self.module(layer)}.{name}": shape for name, shape in shapes.items()}

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Attention:
        spec, prefix = self.spec(config), f"{self.module(layer)}."
        local = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        q, k, v = _apart(local["c_attn.weight"], spec)
        q_bias, k_bias, v_bias = _apart(local["c_attn.bias"], spec)
        o = local["c_proj.weight"].unflatten(1, (spec.num_heads, spec.head_dim))
        return Attention(q, k, v, o, self.scale(config), None, q_bias, k_bias, v_bias, local["c_proj.bias"])

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        """As `Family.join`. Biases that the record lacks are zeros, since the class has them."""
        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        a = record
        assert len(a.k) in (1, len(a.q)), "the class has one KV head, or as many as query heads"
        biases = (_or_zeros(bias, weight[..., 0]) for bias, weight in ((a.q_bias, a.q), (a.k_bias, a.k), (a.v_bias, a.v)))
        local = {
            "c_attn.weight": _together(a.q, a.k, a.v),
            "c_attn.bias": _together(*biases),
            "c_proj.weight": a.o.flatten(1),
            "c_proj.bias": _or_zeros(a.o_bias, a.o[:, 0, 0]),
        }
        return {f"{self.module(layer)}.{name}": tensor for name, tensor in local.items()}

    def traits(self, config: Any) -> Traits:
        return Traits(qkv_bias=True, o_bias=True, qk_norm=None, layers_with_rotary=0, adds_output=True, beyond={})

    def rotary(self, config: Any, layer: int) -> None:
        return None

    def scale(self, config: Any) -> float:
        return super().scale(config) if config.scale_attn_weights else 1.0

    def output(self, layer: int) -> str:
        return f"{self.module(layer)}.c_proj"


def _apart(stored: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, ...]:
    """Queries `[H, D, …]`, keys and values `[G, D, …]`, as views."""
    if spec.num_kv_heads == spec.num_heads:
        return stored.unflatten(0, (spec.num_heads, 3, spec.head_dim)).unbind(1)
    return stored.unflatten(0, (-1, spec.head_dim)).split((spec.num_heads, 1, 1))


def _together(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The inverse of `_apart`."""
    import torch

    return torch.stack((q, k, v), 1).flatten(0, 2) if len(q) == len(k) else torch.cat((q, k, v)).flatten(0, 1)


def _or_zeros(bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(like.shape) if bias is None else bias


FAMILY = MultiQueryProjections()
