"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import tiny_config, tiny_model

NAMES = {gguf.MODEL_ARCH.LLAMA: "llama", gguf.MODEL_ARCH.QWEN2: "qwen2", gguf.MODEL_ARCH.QWEN3: "qwen3"}
HEAD_DIM = 32  # quantised blocks have 32 numbers


def model_of(model_type: str, seed: int = 0, **changes: Any) -> Any:
    head_dim = 128 if model_type == "qwen3" else HEAD_DIM  # what its config has by default, since transformers does not read it
    config = tiny_config(
        model_type, hidden_size=4 * HEAD_DIM, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, head_dim=head_dim, vocab_size=300, rope_theta=5000.0, rms_norm_eps=1e-5, bos_token_id=5,
        eos_token_id=7, **changes,
    )  # fmt: skip
    return tiny_model(config, seed)


def write(
    path: Path,
    model: Any,
    kind: str = "F32",
    keys: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    without: str = "nothing",
    pre: str = "gpt-2",
    others: dict[str, str] | None = None,
) -> Path:
    """As llama.cpp's converter writes it; with `keys` of its architecture and tensors `more`, or without one."""
    config = model.config
    arch = next(arch for arch, name in NAMES.items() if name == config.model_type)
    writer = gguf.GGUFWriter(path, config.model_type)
    written = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), config.head_dim),
    } | (keys or {})  # fmt: skip
    for key, value in written.items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            f"{config.model_type}.{key}", value
        )
    characters = [*(chr(i) for i in range(33, 332)), "!!"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(characters)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(characters))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not _tied(model, name)} | (more or {})
    for name, tensor in tensors.items():
        if name == without:
            continue
        place = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        values = tensor.float().numpy()
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        stored = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else (others or {}).get(name, kind)]
        plain = stored == gguf.GGMLQuantizationType.F32
        data = values if plain else gguf.quants.quantize(values, stored)
        writer.add_tensor(place, np.ascontiguousarray(data), raw_dtype=None if plain else stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tied(model: Any, name: str) -> bool:
    return name == "lm_head.weight" and bool(model.config.tie_word_embeddings)
