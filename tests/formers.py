"""Small checkpoints of former model types: models of the classes that compute the same, in the names of the types' own code."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tiny import random_model
from torch import Tensor

WIDTH, HEADS, INNER, LAYERS, TOKENS = 48, 4, 56, 2, 331
Tensors = dict[str, Tensor]

_SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "vocab_size": TOKENS}
_LLAMA = {
    **_SIZES, "intermediate_size": INNER, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FALCON = {
    "n_head": HEADS, "n_layer": LAYERS, "hidden_size": WIDTH, "vocab_size": TOKENS, "alibi": False, "bias": False,
    "parallel_attn": True, "layer_norm_epsilon": 1e-3, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "RefinedWebModel": {**_FALCON, "multi_query": True},
    "RefinedWeb": {**_FALCON, "n_head_kv": 2},
    "stablelm_epoch": {
        **_SIZES, "intermediate_size": INNER, "hidden_act": "silu", "max_position_embeddings": 64, "norm_eps": 1e-3,
        "num_key_value_heads": 2, "rope_pct": 1 / 3, "rope_theta": 5000, "rotary_scaling_factor": 1.0, "use_qkv_bias": True,
        "tie_word_embeddings": False,
    },
    "Yi": {**_LLAMA, "num_key_value_heads": 2, "rope_theta": 5e6},
    "internlm": {**_LLAMA, "bias": True, "rotary": {"type": "dynamic", "base": 5000}},
    "baichuan": {
        **_LLAMA, "architectures": ["BaiChuanForCausalLM"], "model_max_length": 64, "tokenizer_class": "BaichuanTokenizer",
    },
    "qwen": {
        **_SIZES, "architectures": ["QWenLMHeadModel"], "intermediate_size": 2 * INNER, "kv_channels": WIDTH // HEADS,
        "layer_norm_epsilon": 1e-3, "max_position_embeddings": 128, "seq_length": 64, "no_bias": True, "rotary_pct": 1.0,
        "rotary_emb_base": 10000, "scale_attn_weights": True, "use_dynamic_ntk": True, "use_logn_attn": True,
        "tie_word_embeddings": False, "tokenizer_class": "QWenTokenizer",
    },
    "phi-msft": {
        "n_embd": WIDTH, "n_head": HEADS, "n_head_kv": None, "n_inner": None, "n_layer": LAYERS, "n_positions": 64,
        "rotary_dim": 8, "vocab_size": TOKENS, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False,
    },
}  # fmt: skip


class _Same(NamedTuple):
    """What computes the same as a type's own code.

    Attributes:
        model_type: The class's.
        config: Its config.
        names: Parts of the class's names, and what its own code calls them, replaced in this order.
        stack: What its own code calls queries, keys and values above each other, in place of `self_attn`'s; "" for apart.
    """

    model_type: str
    config: dict[str, Any]
    names: Sequence[tuple[str, str]] = ()
    stack: str = ""


_ROWS = {"new_decoder_architecture": True, "num_kv_heads": 2}
_NAMED = {key.replace("n_head", "num_attention_heads").replace("n_layer", "num_hidden_layers"): v for key, v in _FALCON.items()}
_LAYER = ("model.layers.", "transformer.h.")
_CLASSES: dict[str, _Same] = {
    "RefinedWebModel": _Same("falcon", {**_NAMED, "multi_query": True}),
    "RefinedWeb": _Same("falcon", {**_NAMED, **_ROWS}),
    "stablelm_epoch": _Same(
        "stablelm",
        {**_LLAMA, "layer_norm_eps": 1e-3, "num_key_value_heads": 2, "partial_rotary_factor": 1 / 3, "rope_theta": 5000,
         "use_qkv_bias": True},
    ),
    "Yi": _Same(
        "llama", {**_LLAMA, "num_key_value_heads": 2, "rope_theta": 5e6},
        [("input_layernorm", "ln1"), ("post_attention_layernorm", "ln2")],
    ),
    "internlm": _Same("llama", {**_LLAMA, "attention_bias": True, "rope_theta": 5000}),
    "baichuan": _Same("llama", _LLAMA, stack="self_attn.W_pack"),
    "qwen": _Same(
        "qwen2", {**_LLAMA, "num_key_value_heads": HEADS, "rope_theta": 10000},
        [
            _LAYER, ("model.embed_tokens", "transformer.wte"), ("model.norm", "transformer.ln_f"), ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"), ("self_attn.o_proj", "attn.c_proj"), ("mlp.up_proj", "mlp.w1"),
            ("mlp.gate_proj", "mlp.w2"), ("mlp.down_proj", "mlp.c_proj"),
        ],
        "attn.c_attn",
    ),
    "phi-msft": _Same(
        "phi",
        {**_SIZES, "intermediate_size": 4 * WIDTH, "hidden_act": "gelu_new", "max_position_embeddings": 64,
         "layer_norm_eps": 1e-5, "partial_rotary_factor": 8 * HEADS / WIDTH, "tie_word_embeddings": False},
        [
            _LAYER, ("lm_head.", "lm_head.linear."), ("model.final_layernorm", "lm_head.ln"), ("input_layernorm", "ln"),
            ("model.embed_tokens", "transformer.embd.wte"), ("self_attn.dense", "mixer.out_proj"),
        ],
        "mixer.Wqkv",
    ),
}  # fmt: skip


def config_of(kind: str) -> dict[str, Any]:
    """The config.json of a type."""
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    return {"model_type": kind, "auto_map": own, "torch_dtype": "float32", **CONFIGS[kind]}


def model_of(kind: str) -> Any:
    """A random model of the class that computes the same as a type's own code."""
    from transformers import AutoConfig

    return random_model(AutoConfig.for_model(_CLASSES[kind].model_type, **_CLASSES[kind].config))


def tensors_of(kind: str) -> Tensors:
    """The tensors of `model_of`, as the type's own code has them."""
    same, tensors = _CLASSES[kind], Tensors()
    for name, tensor in model_of(kind).state_dict().items():
        name = re.sub(r"self_attn\.[qkv]_proj", same.stack, name) if same.stack else name
        for new, old in same.names:
            name = name.replace(new, old)
        tensors[name] = torch.cat((tensors[name], tensor)) if name in tensors else tensor.clone()
    return tensors


def write(directory: Path, kind: str, tensors: Tensors | None = None, shards: int = 1, **changes: Any) -> Path:
    """A checkpoint in its original form."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(kind) | changes))
    tensors = tensors_of(kind) if tensors is None else tensors
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = list(tensors)
    files = {f"model-{shard + 1:05}-of-{shards:05}.safetensors": names[shard::shards] for shard in range(shards)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
