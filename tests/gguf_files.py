"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny import random_model, tiny_config

# By model type, its architecture, and what a file does not say and transformers takes from its class.
_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 16}
ARCHITECTURES: dict[str, tuple[gguf.MODEL_ARCH, dict[str, Any]]] = {
    "llama": (gguf.MODEL_ARCH.LLAMA, {}),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, {}),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, {"head_dim": 128}),
    "qwen2_moe": (gguf.MODEL_ARCH.QWEN2MOE, {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}),
    "qwen3_moe": (gguf.MODEL_ARCH.QWEN3MOE, {"moe_intermediate_size": 768, "norm_topk_prob": True}),
    "phi3": (gguf.MODEL_ARCH.PHI3, {}),
    "falcon": (gguf.MODEL_ARCH.FALCON, {"multi_query": True, "ffn_hidden_size": 512, "layer_norm_epsilon": 1e-5}),
    "stablelm": (gguf.MODEL_ARCH.STABLELM, {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
    "starcoder2": (gguf.MODEL_ARCH.STARCODER2, {"rope_theta": 10000.0}),
    "nemotron": (gguf.MODEL_ARCH.NEMOTRON, {"norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
    "gemma2": (gguf.MODEL_ARCH.GEMMA2, {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3_text": (gguf.MODEL_ARCH.GEMMA3, {**_GEMMA, "num_hidden_layers": 6}),
}
HEAD_DIM = 32  # quantised blocks have 32 numbers


def model_of(model_type: str, seed: int = 0, **changes: Any) -> Any:
    values = {
        "hidden_size": 4 * HEAD_DIM, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "head_dim": HEAD_DIM, "vocab_size": 300, "rope_theta": 5000.0, "rms_norm_eps": 1e-5,
        "bos_token_id": 5, "eos_token_id": 7,
        "pad_token_id": 9,
    }  # fmt: skip
    return random_model(tiny_config(model_type, **(values | ARCHITECTURES[model_type][1] | changes)), seed)


def write(
    path: Path,
    model: Any,
    kind: str = "F32",
    keys: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    others: dict[str, str] | None = None,
) -> Path:
    """As llama.cpp's converter writes it; with other `keys` (None: without), or more tensors."""
    config = model.config
    arch = ARCHITECTURES[config.model_type][0]
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(path, name)
    for key, value in (_keys(config) | (keys or {})).items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
            add(f"{name}.{key}", value)
    characters = [*(chr(i) for i in range(33, 332)), "!!"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(characters)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(characters))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    tensors = {own: tensor for own, tensor in model.state_dict().items() if not _tied(model, own)} | (more or {})
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for own, tensor in tensors.items():
        for place, values in _stored(config, names, own, tensor.float()):
            stored = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else (others or {}).get(own, kind)]
            plain = stored == gguf.GGMLQuantizationType.F32
            data = values if plain else gguf.quants.quantize(values, stored)
            writer.add_tensor(place, np.ascontiguousarray(data), raw_dtype=None if plain else stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(config: Any) -> dict[str, Any]:
    """What a header says of a config; None for what it does not."""
    read = {name: getattr(config, name, None) for name in ("num_experts", "num_experts_per_tok", "sliding_window")}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope
    inner = 4 * config.hidden_size if config.model_type == "falcon" else config.intermediate_size
    layer_norm = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    return {
        "block_count": config.num_hidden_layers, "context_length": getattr(config, "max_position_embeddings", None),
        "embedding_length": config.hidden_size, "feed_forward_length": inner,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1 if config.model_type == "falcon" else getattr(config, "num_key_value_heads", None),
        "rope.freq_base": float(rope["rope_theta"]) if rope else None,
        "rope.dimension_count": int(head_dim * (rope.get("partial_rotary_factor") or 1)) if rope else None,
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps if "rms_norm_eps" in type(config)().to_dict() else None,
        "attention.layer_norm_epsilon": next((getattr(config, name) for name in layer_norm if hasattr(config, name)), None),
        "attention.sliding_window": read["sliding_window"],
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "expert_count": read["num_experts"], "expert_used_count": read["num_experts_per_tok"],
    }  # fmt: skip


def _stored(config: Any, names: Any, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """The tensors of a file that hold one of a model."""
    model_type, values = config.model_type, tensor.numpy()
    if name.endswith("experts.gate_up_proj"):
        layer = name.split(".")[2]
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"blk.{layer}.ffn_{part}_exps.weight", half
        return
    known = (names.get_name(one, try_suffixes=(".weight", ".bias")) for one in (name, name.removeprefix("transformer.")))
    place = next(filter(None, known), name)
    if name.endswith("experts.down_proj"):
        place += ".weight"
    elif name.endswith("shared_expert_gate.weight"):
        values = values[0]
    elif model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    elif model_type in ("gemma2", "gemma3_text", "nemotron") and place.endswith("norm.weight"):
        values = values + 1
    yield place, values


def _tied(model: Any, name: str) -> bool:
    return name == "lm_head.weight" and bool(model.config.tie_word_embeddings)
