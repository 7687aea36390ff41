"""BLOOM: interleaved projections as GPT-NeoX has them, and ALiBi in place of RoPE.

Its class ignores `num_key_value_heads`, so only other classes can share KV heads. Its attention adds the residual itself.
"""

from __future__ import annotations

import math

from convert.families.names import Row
from convert.families.separate import nowhere
from convert.families.stacked import MEGATRON, StackedProjections
from convert.families.tables import megatron

_LAYERS = "transformer.h"


class Bloom(StackedProjections):
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


def _falling(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … 2^-8."""
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


FAMILY = Bloom(
    "bloom",
    **MEGATRON,
    names=megatron(_LAYERS, "transformer.word_embeddings", "transformer.ln_f", "lm_head").replacing(
        Row("transformer.word_embeddings_layernorm", ("embedding_norm",))
    ),
    qkv_bias=True,
    o_bias=True,
    rotates=nowhere,
    sums_unless=("apply_residual_connection_post_layernorm",),
    attention_path=f"{_LAYERS}.{{layer}}.self_attention",
    base="transformer",
)
