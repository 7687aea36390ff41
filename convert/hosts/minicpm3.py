"""Stock MiniCPM3: the output class of MLA for sources with Llama's blocks that scale what they embed.

The class multiplies embeddings by `scale_emb`, what layers add by `scale_depth` / √layers, and divides the last hidden states
by hidden_size / `dim_model_base`. Its norms store gains themselves, so 1 is added to those of a source that stores gain − 1.
"""

from __future__ import annotations

import math
from typing import Any

from attention.spec import AttentionSpec
from convert.hosts.latent import StockLatent

_SCALES = ("scale_emb", "scale_depth", "dim_model_base", "mlp_bias")


class MiniCPM3(StockLatent):
    """The stock class `minicpm3`."""

    name = "minicpm3"
    blocks = "Gemma's"
    families = ("gemma",)  # tested to be exact
    served_by = "vLLM and llama.cpp refuse it"
    remarks = (
        *StockLatent.remarks,
        "The model needs the biases of `kv_a_proj_with_mqa`, `o_proj` and, if it has one, `q_a_proj`, which MiniCPM3's own\n"
        "checkpoints lack. So config.json says that the architecture is TransformersForCausalLM, and engines do not take\n"
        "their own MiniCPM3 classes. Saving the model again with transformers changes that field.",
        "Gains of norms are stored as they are, and Gemma stores them less one. In bfloat16 this rounds them once more.",
    )

    def refuses_blocks(self, config: Any) -> str | None:
        if config.hidden_size % config.num_attention_heads:
            return (
                f"hidden_size is {config.hidden_size}, and the class takes only multiples of the {config.num_attention_heads} "
                "attention heads"
            )
        return None

    def own(self, config: Any, target: AttentionSpec) -> dict[str, Any]:
        if config.model_type == self.name:
            return {key: getattr(config, key) for key in _SCALES}
        scales = config.hidden_size**0.5, math.sqrt(target.num_layers), config.hidden_size, False
        return dict(zip(_SCALES, scales, strict=True))


HOST = MiniCPM3()
