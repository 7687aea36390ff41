"""GPTBigCode (SantaCoder, StarCoder): one projection for queries, keys and values, with one KV head or as many as query heads.

Its class knows no other number of KV heads. Positions are learned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.separate import nowhere
from convert.families.stacked import BY_KV_HEAD, StackedProjections
from convert.families.tables import GPT2

if TYPE_CHECKING:
    import torch


class MultiQueryProjections(StackedProjections):
    """`c_attn [(H + 2) D, E]`, or without `multi_query` `c_attn [H 3 D, E]`, and `c_proj [E, H D]`, all with biases."""

    @property
    def class_kv_heads(self) -> int:
        return 1 if self.decoder.multi_query else super().class_kv_heads

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        assert len(record.k) in (1, len(record.q)), "the class has one KV head, or as many as query heads"
        return super().join(record, spec, layer)

    @property
    def scale(self) -> float:
        return super().scale if self.decoder.scale_attn_weights else 1.0


GPT_BIGCODE: dict[str, Any] = {
    "model_type": "gpt_bigcode",
    "names": GPT2,
    "qkv_name": "c_attn",
    "order": BY_KV_HEAD,
    "shares_heads": False,
    "o_name": "c_proj",
    "qkv_bias": True,
    "o_bias": True,
    "rotates": nowhere,
    "attention_path": "transformer.h.{layer}.attn",
    "base": "transformer",
    "required_values": (("add_cross_attention", False, "it has cross-attention (add_cross_attention)"),),
}
FAMILY = MultiQueryProjections(**GPT_BIGCODE)
