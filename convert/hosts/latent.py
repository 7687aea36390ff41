"""The base of stock output classes with latent attention: DeepSeek-V3's and those that equal it.

`convert.families.latent` writes their tensors and the constant channels that neutralise their latent norm. Query biases, for
which the classes have no place, go through their latent of queries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family
from convert.families.neutral import constants, latent_size, query_rank
from convert.hosts.base import Host, carried

# RoPE types with one or two (LongRoPE) lists of frequencies; `dynamic` makes them a function of the length.
LISTED_ROPE = ("default", "linear", "llama3", "yarn", "longrope")
# What engines choose their code by; transformers goes by model_type. Their own classes would drop the biases. By this name vLLM
# runs transformers' modules, and software that does not know it refuses.
_ARCHITECTURE = "TransformersForCausalLM"
_CARRIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "tie_word_embeddings",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip

EXPANDS = (  # a remark on all that stock transformers runs
    "Stock transformers expands the whole cached latent for every new token. kvfold's `attention` package does not:\n"
    '`model = attention.load("path/to/this/directory")`, or `attention.absorb(model)` for a loaded model.'
)


class StockLatent(Host):
    """A stock class that caches a latent and a RoPE key.

    Attributes:
        blocks: Whose decoder blocks it has, for refusals.
    """

    blocks: str
    opened_by = "transformers ≥ 5.19 loads it without kvfold, and caches only the latent and the RoPE key."
    remarks: tuple[str, ...] = (EXPANDS,)
    replaces = "factored into kv_a_proj_with_mqa and kv_b_proj"

    @abstractmethod
    def own(self, config: Any, target: AttentionSpec) -> dict[str, Any]:
        """The fields of config.json that only this class has."""

    @abstractmethod
    def refuses_blocks(self, config: Any) -> str | None:
        """Why the class cannot hold what is around the attention, of a family that it is for; None if it can."""

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        config = family.config
        parameters = getattr(config, "rope_parameters", None) or {}
        if family.model_type not in self.families:
            known = ", ".join(self.families)
            return f"{family.model_type} does not have {self.blocks} decoder blocks (the class can hold {known})"
        if parameters.get("rope_type") not in LISTED_ROPE:
            return f"RoPE of type {parameters.get('rope_type', 'per layer type')!r} has no fixed list of frequencies"
        rotary = family.rotary(0)
        if family.restarts_cache and rotary and rotary.long_frequencies is not None:
            return (
                f"its LongRoPE has other frequencies beyond {rotary.long_beyond} tokens, where its own class computes the "
                "cache anew, and this one does not"
            )
        if family.without_latent:
            return family.without_latent
        traits = family.traits
        if traits.qk_norm:
            return "queries and keys are normalised (QK-norm), so their heads cannot be mixed"
        if reason := self.refuses_blocks(config):
            return reason
        if not traits.layers_with_rotary:
            return "no layer has RoPE, and the class needs a RoPE key in every layer"
        for field, value in traits.extra_features.items():
            if field != "sliding_window":
                return f"config.json sets {field} to {value}, which the class does not support"
            if value < (positions := config.max_position_embeddings):  # a window over all positions is fine
                return (
                    f"the sliding window of {value} tokens is shorter than the {positions} positions, and the class has no "
                    f"window (for contexts up to {value}, set max_position_embeddings to {value} in config.json)"
                )
        return None

    def reserved(self, kv_lora_rank: int) -> int:
        return len(constants(kv_lora_rank))

    def latent_size(self, kv_lora_rank: int) -> float | None:
        return latent_size(constants(kv_lora_rank))

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        config = family.config
        return {
            "architectures": [_ARCHITECTURE],
            "model_type": self.name,
            **carried(raw, config, _CARRIED),
            "num_key_value_heads": target.num_heads,
            "kv_lora_rank": target.kv_lora_rank,
            "q_lora_rank": query_rank(config.hidden_size) if family.traits.qkv_bias else None,
            "qk_nope_head_dim": target.qk_nope_head_dim,
            "qk_rope_head_dim": target.qk_rope_head_dim,
            "v_head_dim": target.head_dim,
            "attention_bias": True,
            **({} if rotary is None else {"rope_parameters": rope_parameters(rotary, config)}),
            **self.own(config, target),
        }

    def notes(self, family: Family) -> tuple[str, ...]:
        if not family.traits.qkv_bias:
            return ()
        width = family.config.hidden_size
        rank = query_rank(width)
        return (f"query biases go through q_a_proj, an identity with a constant: {width} × {rank} more weights in each layer",)


def rope_parameters(rotary: Rotary, config: Any) -> dict[str, Any]:
    """The config's entry for any list of frequencies: LongRoPE's factors.

    LongRoPE computes 1 / (factor · θ^(2i/P)); with θ = 1 each factor is the inverse of a frequency, rounded once. It is written
    even if the default formula gives the frequencies: vLLM's DeepSeek class, which drops biases without an error, does not
    start with it. That class is chosen once transformers has saved the model again.
    """
    long = rotary.frequencies if rotary.long_frequencies is None else rotary.long_frequencies
    return {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "short_factor": (1 / rotary.frequencies).tolist(),
        "long_factor": (1 / long).tolist(),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": rotary.long_beyond or config.max_position_embeddings,
    }
