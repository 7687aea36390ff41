"""What tests of layer streams share: tiny models, a stream of each, and what layers see in the whole model."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_config, tiny_model

from attention.record import Attention, FactoredAttention
from convert.calibration.stream import LayerStream
from convert.families import FAMILIES
from convert.methods.blocks import Blocks
from eval.inputs.reader import TensorInfo

CPU = torch.device("cpu")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2, biases": ("qwen2", {}),
    "gemma2, sliding layers and scaled embeddings": ("gemma2", {"sliding_window": 5}),
    "gemma3, two rotary tables": ("gemma3_text", {
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "mistral, a window": ("mistral", {"sliding_window": 4}),
    "smollm3, a layer without RoPE": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "olmo2, norms after the blocks": ("olmo2", {}),
    "granite, multipliers": ("granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "phi, parallel blocks": ("phi", {}),
    "mixtral, experts": ("mixtral", {}),
    "llama, longrope": ("llama", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
        "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [4.0, 1.0, 5.0, 9.0]}}),
    "deepseek_v3": ("deepseek_v3", {
        "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
        "first_k_dense_replace": 3, "n_routed_experts": 1, "num_key_value_heads": 8, "attention_bias": True}),
}  # fmt: skip


def blocks_of(count: int = 7, length: int = 12) -> torch.Tensor:
    return torch.randint(4, 96, (count, length), generator=torch.Generator().manual_seed(1))


def attentions(model: Any) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(".self_attn")]


def seen_by(model: Any, blocks: torch.Tensor, paths: list[str] | None = None) -> list[torch.Tensor]:
    """What goes into each layer's attention in the whole model: `[n, T, E]` each."""
    seen: list[torch.Tensor] = []

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).clone())

    paths = paths or attentions(model)
    handles = [model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True) for path in paths]
    with torch.inference_mode():
        model(blocks, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def stream_of(
    model: Any, spool: Path, text: torch.Tensor | Blocks, read: Callable[[str], torch.Tensor] | None = None
) -> LayerStream:
    text = text if isinstance(text, Blocks) else Blocks.whole(text)
    weights = model.state_dict()
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    return LayerStream(model.config, attentions(model), read or weights.__getitem__, infos, text, spool, CPU)


def records_of(model: Any) -> Callable[[int], Attention]:
    """Maps a layer to the record of its attention, as methods take it."""
    family, weights = FAMILIES[model.config.model_type], model.state_dict()

    def record(layer: int) -> Attention:
        tensors = {name: weights[name] for name in family.of(model.config).shapes(layer)}
        found = family.of(model.config).split(tensors, layer)
        return found.expanded() if isinstance(found, FactoredAttention) else found

    return record


def model_of(case: str = "llama") -> Any:
    model_type, changes = MODELS[case]
    return tiny_model(tiny_config(model_type, **changes))


def of_blocks(count: int, context: int, width: int) -> Any:
    """As much of a stream as sums have to know."""
    text = Blocks.whole(torch.zeros(count, context))
    return types.SimpleNamespace(text=text, width=width, device=CPU)
