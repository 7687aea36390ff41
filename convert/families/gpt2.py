"""GPT-2 and GPTBigCode (SantaCoder, StarCoder): one projection for queries, keys and values, biases, learned positions.

GPT-2 stores all weights `[in, out]` (Conv1D), and its class ignores `num_key_value_heads`. That of GPTBigCode has one KV head,
or as many as query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.heads import BY_KV_HEAD, BY_PART, Projections, nowhere
from convert.families.names import GPT2, in_layers

if TYPE_CHECKING:
    import torch

_DIVIDES = "scale_attn_by_inverse_layer_idx"


class _LikeGpt2(Projections):
    @property
    def scale(self) -> float:
        return super().scale if self.decoder.scale_attn_weights else 1.0


class Conv1DProjections(_LikeGpt2):
    """`c_attn [E, 3 H D]` and `c_proj [H D, E]`, both with biases.

    With `scale_attn_by_inverse_layer_idx`, layer l, from 0, divides its logits by l + 1; in records, its queries are divided.
    """

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        return {name: shape[::-1] for name, shape in super().shapes(layer).items()}

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> Attention:
        record = super().split(_transposed(tensors), layer)
        return record.with_queries_times(1 / (layer + 1)) if self.folded else record

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        return _transposed(super().join(record, spec, layer))

    def in_class(self, a: Attention, layer: int) -> Attention:
        return super().in_class(a.with_queries_times(layer + 1) if self.folded else a, layer)

    @property
    def folded(self) -> tuple[str, ...]:
        return (_DIVIDES,) if getattr(self.decoder, _DIVIDES) else ()


def _transposed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.mT if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}


class MultiQueryProjections(_LikeGpt2):
    """`c_attn [(H + 2) D, E]`, or without `multi_query` `c_attn [H 3 D, E]`, and `c_proj [E, H D]`, all with biases."""

    @property
    def class_kv_heads(self) -> int:
        return 1 if self.decoder.multi_query else super().class_kv_heads

    def in_class(self, a: Attention, layer: int) -> Attention:
        assert len(a.k) in (1, len(a.q)), "the class has one KV head, or as many as query heads"
        return super().in_class(a, layer)


_ALIKE: dict[str, Any] = {
    "projections": ("c_attn", "c_proj"),
    "qkv_bias": True,
    "o_bias": True,
    "rotates": nowhere,
    "shares_heads": False,
    "attention_path": "transformer.h.{layer}.attn",
    "base": "transformer",
    "required_values": (("add_cross_attention", False, "it has cross-attention (add_cross_attention)"),),
}
GPT_BIGCODE: dict[str, Any] = {**_ALIKE, "model_type": "gpt_bigcode", "names": GPT2, "order": BY_KV_HEAD}
ROWS = (
    Conv1DProjections(
        "gpt2",
        **_ALIKE,
        names=GPT2.replacing(
            in_layers("transformer.h", "mlp.c_fc", "mlp.up", transposed=True),
            in_layers("transformer.h", "mlp.c_proj", "mlp.down", transposed=True),
        ),
        order=replace(BY_PART, layout="stacked projections, transposed"),
        computed=("inv_freq", ".attn.bias", ".attn.masked_bias"),  # the causal mask of old checkpoints
    ),
    MultiQueryProjections(**GPT_BIGCODE),
)
