"""GPTBigCode (SantaCoder, StarCoder): one projection for queries, keys and values, with one KV head or as many as query heads.

Its class knows no other number of KV heads. Rows lie by KV head, as in `convert.families.interleaved`. Positions are learned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.base import Traits
from convert.families.interleaved import InterleavedProjections
from convert.families.projections import or_zeros, with_biases
from convert.families.tables import GPT2

if TYPE_CHECKING:
    import torch


class MultiQueryProjections(InterleavedProjections):
    """`c_attn [(H + 2) D, E]`, or without `multi_query` `c_attn [H 3 D, E]`, and `c_proj [E, H D]`, all with biases."""

    model_type = "gpt_bigcode"
    names = GPT2
    attention_path = "transformer.h.{layer}.attn"
    base = "transformer"
    qkv_name = "c_attn"
    o_name = "c_proj"

    def unreadable(self, config: Any) -> str | None:
        return "it has cross-attention (add_cross_attention)" if config.add_cross_attention else None

    def class_kv_heads(self, config: Any) -> int:
        return 1 if config.multi_query else super().class_kv_heads(config)

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        """As `Family.join`. Biases that the record lacks are zeros, since the class has them."""
        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        assert len(record.k) in (1, len(record.q)), "the class has one KV head, or as many as query heads"
        whole = replace(with_biases(record), o_bias=or_zeros(record.o_bias, record.o[:, 0, 0]))
        return super().join(whole, spec, layer)

    def traits(self, config: Any) -> Traits:
        return Traits(qkv_bias=True, o_bias=True, qk_norm=None, layers_with_rotary=0, adds_output=True, extra_features={})

    def rotary(self, config: Any, layer: int) -> None:
        return None

    def scale(self, config: Any) -> float:
        return super().scale(config) if config.scale_attn_weights else 1.0


FAMILY = MultiQueryProjections()
