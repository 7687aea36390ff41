"""Stock GPTBigCode with one KV head: the output class of MQA for sources whose blocks are GPT-2's.

Their own classes cannot share KV heads, and this one can. `convert.families.gpt2` writes its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attention.record import Attention
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family
from convert.families.base import WINDOWS
from convert.families.gpt2 import GPT_BIGCODE, MultiQueryProjections
from convert.hosts.base import Host, architecture, carried

# What the class and its sources call the same settings; all others have one name in all of them.
_GPT2 = {
    "n_inner": "n_inner", "layer_norm_epsilon": "layer_norm_epsilon", "initializer_range": "initializer_range",
    "embd_pdrop": "embd_pdrop", "resid_pdrop": "resid_pdrop", "attn_pdrop": "attn_pdrop",
}  # fmt: skip
_SETTINGS: dict[str, Mapping[str, str]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "opt": {
        "n_inner": "ffn_dim", "initializer_range": "init_std", "resid_pdrop": "dropout", "attn_pdrop": "attention_dropout",
    },
    "gpt_neo": {
        "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_epsilon", "initializer_range": "initializer_range",
        "embd_pdrop": "embed_dropout", "resid_pdrop": "resid_dropout", "attn_pdrop": "attention_dropout",
    },
}  # fmt: skip
_CARRIED = (
    "vocab_size", "activation_function", "use_cache", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
# Where a source has no such setting.
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "embd_pdrop": 0.0}


class _Scaled(MultiQueryProjections):
    """The layout of results: logits are scaled by D^-½, as engines take for granted."""

    def in_class(self, a: Attention, layer: int) -> Attention:
        factor = a.scale * math.sqrt(a.q.shape[1])
        return super().in_class(a if math.isclose(factor, 1) else a.with_queries_times(factor), layer)


_LAYOUT = _Scaled(**GPT_BIGCODE)


class GPTBigCode(Host):
    """The stock class `gpt_bigcode`."""

    name = "gpt_bigcode"
    runs = frozenset({"transformers", "vllm"})
    served_by = "vLLM serves it; llama.cpp has this class for activations that are a GELU, and was not tried"
    opened_by = "transformers loads it without kvfold."
    remarks = (
        "Positions count from the first column of a batch. Give `position_ids` with padding on the left, as `generate` does.",
    )
    replaces = "became part of c_attn or c_proj"
    families = tuple(_SETTINGS)

    def layout(self, family: Family) -> Family:
        return _LAYOUT

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        if family.model_type not in self.families:
            return f"{family.model_type} does not have GPT-2's decoder blocks (the class can hold {', '.join(self.families)})"
        if target.num_kv_heads != 1:
            return f"it has one KV head, not {target.num_kv_heads}"
        config = family.config
        for field, needed in _needed(config).items():
            if (found := getattr(config, field)) != needed:
                return f"config.json sets {field} to {found}, and the class needs {needed}"
        for field, value in family.traits.extra_features.items():
            if field not in WINDOWS or value < config.max_position_embeddings:
                return f"config.json sets {field} to {value}, which the class does not support"
        return None

    def notes(self, family: Family) -> tuple[str, ...]:
        """Sources with rows for padding count positions from the padding mask, and this class from the first column."""
        if (place := family.names.holding("padding_positions.weight")) is None:
            return ()
        return (
            f"the first {place.leading} rows of {place.name} are dropped: only padding reads them",
            "with padding on the left, the result needs position_ids, which generate gives it: its class has no others",
        )

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        config = family.config
        return {
            "architectures": [architecture("GPTBigCodeForCausalLM", config.activation_function)],
            "model_type": self.name,
            **carried(raw, config, _CARRIED),
            **_DEFAULTS,
            **{name: getattr(config, field) for name, field in _SETTINGS[config.model_type].items()},
            "n_embd": config.hidden_size,
            "n_layer": target.num_layers,
            "n_head": target.num_heads,
            "n_positions": config.max_position_embeddings,
            "scale_attn_weights": True,
            "multi_query": True,
        }


def _needed(config: Any) -> dict[str, Any]:
    """Settings of a source that decide which tensors it has, with the values whose tensors the class has, too."""
    if config.model_type != "opt":
        return {}
    plain = {"enable_bias": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}
    return {**plain, "word_embed_proj_dim": config.hidden_size}


HOST = GPTBigCode()
