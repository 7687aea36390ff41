"""Falcon: interleaved projections, and one KV head for all query heads, or some, or one for each.

Its class of transformers caches the KV heads of `new_decoder_architecture` once for every query head. So the only target that
it holds itself is MQA by `multi_query`, which it caches once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attention.record import Attention
from attention.spec import AttentionSpec
from convert.families.base import Family, decoder_of
from convert.families.heads import Projections
from convert.families.names import in_layers, megatron
from convert.families.rows import MEGATRON

_LAYERS = "transformer.h"
_ONE_NORM = megatron(_LAYERS, "transformer.word_embeddings", "transformer.ln_f", "lm_head")
_TWO_NORMS = _ONE_NORM.replacing(in_layers(_LAYERS, "ln_attn", "attention_norm"), in_layers(_LAYERS, "ln_mlp", "mlp_norm"))


class Falcon(Projections):
    """One of its two tables of names."""

    def of(self, config: Any) -> Family:
        decoder = decoder_of(config)
        two = decoder.new_decoder_architecture and _norms(decoder) == 2
        return replace(super().of(config), names=_TWO_NORMS if two else _ONE_NORM)

    @property
    def unreadable(self) -> str | None:
        if self.decoder.alibi:
            return "its class adds ALiBi once with sdpa and twice with eager attention (alibi is true)"
        config = self.decoder
        grouped, parallel, norms = config.new_decoder_architecture, config.parallel_attn, _norms(config)
        if grouped and not parallel:
            return "its class runs no new_decoder_architecture whose parallel_attn is false"
        if norms not in ((1, 2) if grouped else (1,)) and parallel:
            return f"its class runs no layer with num_ln_in_parallel_attn {norms} and new_decoder_architecture {bool(grouped)}"
        if not (grouped or config.multi_query) and config.num_kv_heads != config.num_attention_heads:
            return (
                f"num_kv_heads is {config.num_kv_heads}, and without multi_query and new_decoder_architecture each of its "
                f"{config.num_attention_heads} query heads has keys and values of its own"
            )
        return None

    @property
    def spec(self) -> AttentionSpec:
        """The KV heads that are projected, however often the class caches them."""
        shared = self.decoder.new_decoder_architecture or self.decoder.multi_query
        return replace(super().spec, num_kv_heads=self.class_kv_heads) if shared else super().spec

    @property
    def class_kv_heads(self) -> int:
        if self.decoder.new_decoder_architecture:
            return int(self.decoder.num_kv_heads)
        return 1 if self.decoder.multi_query else super().class_kv_heads

    def unshared(self, spec: AttentionSpec) -> str | None:
        if spec.num_kv_heads > 1:
            return (
                f"its class of transformers caches keys and values of all {spec.num_heads} query heads unless multi_query is on"
            )
        if self.decoder.new_decoder_architecture and _norms(self.decoder) == 2:
            return "with multi_query, its class has one norm for attention and MLP, and num_ln_in_parallel_attn is 2"
        return None

    def sharing(self, spec: AttentionSpec) -> dict[str, Any]:
        return {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1}

    def in_class(self, a: Attention, layer: int) -> Attention:
        """The same record with pairs of rotary dims D/2 apart, as in the class, which rotates all D."""
        dims = a.rotary.dims if a.rotary else 0
        if dims != a.q.shape[1]:
            order = _order(dims, a.q.shape[1])
            q_bias, k_bias = (None if bias is None else bias[:, order] for bias in (a.q_bias, a.k_bias))
            a = replace(a, q=a.q[:, order], k=a.k[:, order], q_bias=q_bias, k_bias=k_bias)
        return super().in_class(a, layer)

    def describe(self) -> dict[str, Any]:
        facts = super().describe()
        if self.decoder.new_decoder_architecture:
            facts["also"] |= {"KV heads that transformers caches": self.decoder.num_attention_heads}
        return facts


def _order(rotary: int, dims: int) -> list[int]:
    """Which of the dims of a head come first, if both halves of the rotary ones begin a half of all."""
    half, rest = rotary // 2, (dims - rotary) // 2
    parts = (range(half), range(rotary, rotary + rest), range(half, rotary), range(rotary + rest, dims))
    return [dim for part in parts for dim in part]


def _norms(config: Any) -> int:
    """How many norms a parallel layer has."""
    default = 2 if config.new_decoder_architecture else 1
    return default if config.num_ln_in_parallel_attn is None else config.num_ln_in_parallel_attn


FAMILY = Falcon(
    "falcon",
    **MEGATRON,
    names=_ONE_NORM,
    qkv_bias="bias",
    o_bias="bias",
    sums_unless=("parallel_attn", "new_decoder_architecture"),
    attention_path=f"{_LAYERS}.{{layer}}.self_attention",
    base="transformer",
)
