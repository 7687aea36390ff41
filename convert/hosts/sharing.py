"""Stock output classes of GQA and MQA for sources with their blocks, whose own classes cannot share KV heads."""

import math
from collections.abc import Mapping
from typing import Any

from attention.record import Attention
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family
from convert.families.base import WINDOWS
from convert.families.fused_qkv import GPT_BIGCODE, MultiQueryProjections
from convert.hosts.base import StockClass


class Phi(StockClass):
    """Phi: of GQA and MQA for sources with GPT-J's blocks.

    Both have parallel blocks behind one LayerNorm, biases in the MLP and the head, and RoPE in the first dims of each head.
    GPT-J pairs neighbouring dims, and Phi those of two halves: rows change places (`Attention.paired`). Phi's other biases are
    zero.
    """

    name = "phi"
    blocks = "GPT-J's"
    architecture = "PhiForCausalLM"
    carried = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "initializer_range",
        "use_cache", "tie_word_embeddings", "resid_pdrop", "embd_pdrop", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    runs = frozenset({"transformers", "vllm"})
    served_by = "vLLM serves it; the Phi classes of SGLang and llama.cpp have as many KV heads as query heads"
    opened_by = "transformers ≥ 5.19 loads it without kvfold."
    remarks = (
        "The Phi classes of SGLang and llama.cpp have as many KV heads as query heads, and refuse the weights.",
        "The source's class computes the logits of its attention in float32, and this one in the dtype that it runs in. In\n"
        "float16 with eager attention, a product of a query and a key above 65504 is infinite before it is scaled.",
        "The source's class adds an embedding for each of `token_type_ids`. This one ignores them.",
    )
    replaces = "became q_proj, k_proj, v_proj and dense"
    families = ("codegen", "gptj")  # each is tested to be exact

    def refuses_config(self, family: Family, target: AttentionSpec) -> str | None:
        config = family.config
        head_dim, dims = target.head_dim, config.rotary_dim
        if (found := int(head_dim * (dims / head_dim))) != dims:
            return (
                f"it has rotary_dim {dims}, and the class computes {found} from heads of {head_dim} dims and their share "
                f"{dims / head_dim}"
            )
        pad, vocabulary = getattr(config, "pad_token_id", None), config.vocab_size
        if pad is not None and not -vocabulary <= pad < vocabulary:
            return (
                f"pad_token_id is {pad}, and the class has no embedding of it beside the {vocabulary} of vocab_size (remove it)"
            )
        return None

    def own(self, family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        config = family.config
        return {
            "intermediate_size": 4 * config.hidden_size if config.n_inner is None else config.n_inner,
            "hidden_act": config.activation_function,
            "layer_norm_eps": config.layer_norm_epsilon,
            "attention_dropout": config.attn_pdrop,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": config.rotary_dim / target.head_dim,
            },
            "qk_layernorm": False,
        }


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
# Settings of OPT that decide which tensors it has, with the values whose tensors the class has, too.
_OF_OPT = {"enable_bias": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}
# Where a source has no such setting.
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "embd_pdrop": 0.0}


class _Scaled(MultiQueryProjections):
    """The layout of results: logits are scaled by D^-½, as engines take for granted."""

    def in_class(self, a: Attention, layer: int) -> Attention:
        factor = a.scale * math.sqrt(a.q.shape[1])
        return super().in_class(a if math.isclose(factor, 1) else a.with_queries_times(factor), layer)


_LAYOUT = _Scaled(**GPT_BIGCODE)


class GPTBigCode(StockClass):
    """GPTBigCode with one KV head: of MQA for sources whose blocks are GPT-2's."""

    name = "gpt_bigcode"
    blocks = "GPT-2's"
    architecture = "GPTBigCodeForCausalLM"
    carried = (
        "vocab_size", "activation_function", "use_cache", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
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

    def refuses_config(self, family: Family, target: AttentionSpec) -> str | None:
        if target.num_kv_heads != 1:
            return f"it has one KV head, not {target.num_kv_heads}"
        config = family.config
        needs = {**_OF_OPT, "word_embed_proj_dim": config.hidden_size} if config.model_type == "opt" else {}
        for field, needed in needs.items():
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

    def own(self, family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        config = family.config
        return {
            **_DEFAULTS,
            **{name: getattr(config, field) for name, field in _SETTINGS[config.model_type].items()},
            "n_embd": config.hidden_size,
            "n_layer": target.num_layers,
            "n_head": target.num_heads,
            "n_positions": config.max_position_embeddings,
            "scale_attn_weights": True,
            "multi_query": True,
        }


PHI, BIGCODE = Phi(), GPTBigCode()
