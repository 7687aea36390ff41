"""Stock Falcon with one KV head: the output class of MQA for sources with its blocks, whose own class cannot share heads.

Attention and MLP run one after the other. In parallel, the class has one norm for both unless `new_decoder_architecture` is on,
and then it caches keys and values of every query head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family
from convert.hosts.base import Host, architecture, carried
from convert.hosts.latent import LISTED_ROPE, rope_parameters

# Where the class has RoPE of all dims, and a source of some: a frequency whose rotation no float tells from none.
_NOPE = 1e-30
_CARRIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "initializer_range",
    "use_cache", "tie_word_embeddings", "hidden_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


class Falcon(Host):
    """The stock class `falcon` with `multi_query`."""

    name = "falcon"
    served_by = "vLLM serves it if the activation is gelu and the MLP four times as wide as the model, and refuses others"
    opened_by = "transformers ≥ 5.19 loads it without kvfold, and caches one KV head."
    replaces = "became query_key_value and dense"
    families = ("gpt_neox",)

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        if family.model_type not in self.families:
            return f"{family.model_type} does not have Falcon's decoder blocks (the class can hold {', '.join(self.families)})"
        if target.num_kv_heads > 1:
            return f"for {target.kind}, the class of transformers caches keys and values of all {target.num_heads} query heads"
        config = family.config
        if config.use_parallel_residual:
            return "use_parallel_residual is true, and with multi_query the class then has one norm for attention and MLP"
        if not config.attention_bias:
            return "attention_bias is false, and the class has biases in attention and MLP, or in neither"
        if target.head_dim % 2:
            return f"heads have {target.head_dim} dims, and the class rotates all of them in pairs"
        rotary, kind = family.rotary(0), config.rope_parameters["rope_type"]
        if rotary and rotary.dims < target.head_dim and (kind not in LISTED_ROPE or rotary.attention_factor != 1):
            return (
                f"{rotary.dims} of {target.head_dim} dims rotate, the class rotates all, and RoPE of type {kind!r} cannot say "
                "that some are nope dims"
            )
        return None

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        config = family.config
        return {
            "architectures": [architecture("FalconForCausalLM", config.hidden_act, ("gelu",))],
            "model_type": "falcon",
            **carried(raw, config, _CARRIED),
            "layer_norm_epsilon": config.layer_norm_eps,
            "ffn_hidden_size": config.intermediate_size,
            "activation": config.hidden_act,
            "attention_dropout": config.hidden_dropout,  # what the class calls so drops outputs of the attention
            "bias": True,
            "alibi": False,
            "parallel_attn": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "num_kv_heads": 1,
            "rope_parameters": _rope(family, target),
        }


def _rope(family: Family, target: AttentionSpec) -> dict[str, Any]:
    """The source's RoPE, for a class that rotates all dims of a head."""
    import torch

    rotary, config = family.rotary(0), family.config
    assert rotary is not None, "the source has RoPE"
    missing = (target.head_dim - rotary.dims) // 2
    if not missing:
        return {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
    nope = torch.full((missing,), _NOPE, dtype=torch.float64)
    long = None if rotary.long_frequencies is None else torch.cat((rotary.long_frequencies, nope))
    return rope_parameters(replace(rotary, frequencies=torch.cat((rotary.frequencies, nope)), long_frequencies=long), config)


HOST = Falcon()
