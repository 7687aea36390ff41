"""Families with fused QKV projections that a row cannot describe: BLOOM, MPT, GPT-2, GPTBigCode and Falcon.

BLOOM and MPT have ALiBi in place of RoPE, and ignore `num_key_value_heads`. BLOOM's attention adds the residual itself. MPT's
class ignores much of `attn_config`.

GPT-2 and GPTBigCode (SantaCoder, StarCoder) have biases and learned positions. GPT-2 stores all weights `[in, out]` (Conv1D),
and its class ignores `num_key_value_heads`. That of GPTBigCode has one KV head, or as many as query heads.

Falcon has one KV head for all query heads, or some, or one for each. Its class of transformers caches the KV heads of
`new_decoder_architecture` once for every query head. So the only target that it holds itself is MQA by `multi_query`, which it
caches once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attention.record import Attention
from attention.spec import AttentionSpec
from convert.families.base import CLIP, Family, Traits, decoder_of
from convert.families.heads import BY_KV_HEAD, BY_PART, Projections, nowhere
from convert.families.names import GPT2, Row, decoder_table, in_layers, megatron
from convert.families.rows import MEGATRON

if TYPE_CHECKING:
    import torch

_MOST = 8  # the exponent of ALiBi's least slope
# (field, the only value that MPT's class or a record knows, the reason for refusing any other)
_ATTENTION: tuple[tuple[str, Any, str], ...] = (
    ("qk_ln", False, "queries and keys are normalised, and its class of transformers leaves that out"),
    ("prefix_lm", False, "a prefix sees itself, and its class of transformers leaves that out"),
    ("attn_type", "multihead_attention", "its class of transformers gives each query head keys and values of its own"),
    ("alibi_bias_max", _MOST, "its class of transformers has ALiBi's slopes for 8"),
    ("alibi", True, "it has no ALiBi, and its class of transformers adds ALiBi all the same"),
)


def _falling(heads: int) -> tuple[float, ...]:
    """2^(-8/n), 2^(-16/n), … 2^-8."""
    return tuple(2.0 ** (-_MOST * (head + 1) / heads) for head in range(heads))


class Bloom(Projections):
    """Biases are everywhere."""

    @property
    def unreadable(self) -> str | None:
        if self.decoder.pretraining_tp > 1 and self.decoder.slow_but_exact:
            return f"its class leaves out biases (slow_but_exact is true and pretraining_tp is {self.decoder.pretraining_tp})"
        return None

    @property
    def slopes(self) -> tuple[float, ...]:
        heads = self.decoder.num_attention_heads
        power = 2 ** math.floor(math.log2(heads))
        between = _falling(2 * power)[::2]  # of twice as many heads, every other one
        return (*_falling(power), *between[: heads - power])


class Mpt(Projections):
    """`attn.Wqkv [3 H D, E]` and `attn.out_proj [E, H D]`."""

    @property
    def unreadable(self) -> str | None:
        if not self.decoder.no_bias:
            return "it has biases, and its class of transformers has none (no_bias is false)"
        for field, known, reason in _ATTENTION:
            if (value := getattr(self.decoder.attn_config, field)) != known:
                return f"{reason} (attn_config.{field} is {value})"
        if (clip := self.decoder.attn_config.clip_qkv) is not None and clip < 0:
            return f"queries, keys and values are clipped to nothing (attn_config.clip_qkv is {clip})"
        return None

    @property
    def traits(self) -> Traits:
        clip = self.decoder.attn_config.clip_qkv  # 0 clips nothing
        return replace(super().traits, extra_features={CLIP: clip} if clip else {})

    @property
    def scale(self) -> float:
        scale = self.decoder.attn_config.softmax_scale
        return super().scale if scale is None else float(scale)

    @property
    def slopes(self) -> tuple[float, ...]:
        heads = self.decoder.num_attention_heads
        falling = _falling(2 ** math.ceil(math.log2(heads)))
        return falling if len(falling) == heads else (*falling[1::2], *falling[::2])[:heads]


BLOOM = Bloom(
    "bloom",
    **MEGATRON,
    names=megatron("transformer.h", "transformer.word_embeddings", "transformer.ln_f", "lm_head").replacing(
        Row("transformer.word_embeddings_layernorm", ("embedding_norm",))
    ),
    qkv_bias=True,
    o_bias=True,
    rotates=nowhere,
    sums_unless=("apply_residual_connection_post_layernorm",),
    attention_path="transformer.h.{layer}.self_attention",
    base="transformer",
)
MPT = Mpt(
    "mpt",
    names=decoder_table(
        "transformer.blocks",
        {"transformer.wte": "embedding", "transformer.norm_f": "final_norm", "lm_head": "head"},
        {"norm_1": "attention_norm", "norm_2": "mlp_norm", "ffn.up_proj": "mlp.up", "ffn.down_proj": "mlp.down"},
    ),
    projections=("Wqkv", "out_proj"),
    rotates=nowhere,
    shares_heads=False,
    attention_path="transformer.blocks.{layer}.attn",
    base="transformer",
)

_DIVIDES = "scale_attn_by_inverse_layer_idx"


class _LikeGpt2(Projections):
    @property
    def scale(self) -> float:
        return super().scale if self.decoder.scale_attn_weights else 1.0


class Conv1DProjections(_LikeGpt2):
    """`c_attn [E, 3 H D]` and `c_proj [H D, E]`, both with biases.

    With `scale_attn_by_inverse_layer_idx`, layer l, from 0, divides its logits by l + 1; in records, its queries are divided.
    """

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> Attention:
        record = super().split(tensors, layer)
        return record.with_queries_times(1 / (layer + 1)) if self.folded else record

    def in_class(self, a: Attention, layer: int) -> Attention:
        return super().in_class(a.with_queries_times(layer + 1) if self.folded else a, layer)

    @property
    def folded(self) -> tuple[str, ...]:
        return (_DIVIDES,) if getattr(self.decoder, _DIVIDES) else ()


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
_GPT2_AND_BIGCODE = (
    Conv1DProjections(
        "gpt2",
        **_ALIKE,
        names=GPT2.replacing(
            in_layers("transformer.h", "mlp.c_fc", "mlp.up", transposed=True),
            in_layers("transformer.h", "mlp.c_proj", "mlp.down", transposed=True),
        ),
        order=replace(BY_PART, layout="stacked projections, transposed"),
        transposed=True,
        computed=("inv_freq", ".attn.bias", ".attn.masked_bias"),  # the causal mask of old checkpoints
    ),
    MultiQueryProjections(**GPT_BIGCODE),
)

_LAYERS = "transformer.h"
_ONE_NORM = megatron(_LAYERS, "transformer.word_embeddings", "transformer.ln_f", "lm_head")
_TWO_NORMS = _ONE_NORM.replacing(in_layers(_LAYERS, "ln_attn", "attention_norm"), in_layers(_LAYERS, "ln_mlp", "mlp_norm"))


class Falcon(Projections):
    """Falcon, which has one of two tables of names."""

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


FALCON = Falcon(
    "falcon",
    **MEGATRON,
    names=_ONE_NORM,
    qkv_bias="bias",
    o_bias="bias",
    sums_unless=("parallel_attn", "new_decoder_architecture"),
    attention_path=f"{_LAYERS}.{{layer}}.self_attention",
    base="transformer",
)
ROWS = (MPT, FALCON, BLOOM, *_GPT2_AND_BIGCODE)
