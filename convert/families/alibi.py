"""BLOOM and MPT: stacked projections, and ALiBi in place of RoPE. Their classes ignore `num_key_value_heads`.

BLOOM's projections are interleaved as GPT-NeoX has them, and its attention adds the residual itself. MPT's class ignores much
of `attn_config`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from convert.families.base import CLIP, Traits
from convert.families.heads import Projections, nowhere
from convert.families.names import NameTable, Row, in_layers, megatron
from convert.families.rows import MEGATRON

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
    names=NameTable(
        [
            Row("transformer.wte", ("embedding",)),
            in_layers("transformer.blocks", "norm_1", "attention_norm"),
            in_layers("transformer.blocks", "norm_2", "mlp_norm"),
            in_layers("transformer.blocks", "ffn.up_proj", "mlp.up"),
            in_layers("transformer.blocks", "ffn.down_proj", "mlp.down"),
            Row("transformer.norm_f", ("final_norm",)),
            Row("lm_head", ("head",)),
        ]
    ),
    projections=("Wqkv", "out_proj"),
    rotates=nowhere,
    shares_heads=False,
    attention_path="transformer.blocks.{layer}.attn",
    base="transformer",
)
