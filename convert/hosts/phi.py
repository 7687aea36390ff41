"""Stock Phi: the output class of GQA and MQA for sources with GPT-J's blocks, whose own classes cannot share KV heads.

Both have parallel blocks behind one LayerNorm, biases in the MLP and the head, and RoPE in the first dims of each head. GPT-J
pairs neighbouring dims, and Phi those of two halves: rows change places (`Attention.paired`). Phi's other biases are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family
from convert.hosts.base import Host, architecture, carried

_CARRIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "initializer_range",
    "use_cache", "tie_word_embeddings", "resid_pdrop", "embd_pdrop", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


class Phi(Host):
    """The stock class `phi`."""

    name = "phi"
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

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        if family.model_type not in self.families:
            return f"{family.model_type} does not have GPT-J's decoder blocks (the class can hold {', '.join(self.families)})"
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

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        config = family.config
        return {
            "architectures": [architecture("PhiForCausalLM", config.activation_function)],
            "model_type": self.name,
            **carried(raw, config, _CARRIED),
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


HOST = Phi()
