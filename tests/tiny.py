"""Tiny random models with nothing at zero or one, so that nothing can hide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16}  # fmt: skip


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config of `model_type`; `changes` go over the defaults."""
    from transformers import AutoConfig

    values = _SIZES | changes
    if "moe" in model_type or model_type == "mixtral":
        values = _EXPERTS | values
    if model_type.startswith("gemma") or model_type == "vaultgemma":
        values = {"query_pre_attn_scalar": 4} | values
    return AutoConfig.for_model(model_type, **values)


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A causal LM with random weights, biases and norm gains: nothing is zero or one, so that nothing can hide."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def duplicate_kv_heads(model: Any, times: int) -> None:
    """Make runs of `times` KV heads equal, everywhere in the model: weights, biases, gains per head."""
    heads = model.config.num_key_value_heads
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.split("self_attn.")[-1]
            if not part.startswith(("k_", "v_", "key_")) or parameter.shape[0] % heads or ".norms." in part:
                continue
            if part.startswith(("k_proj", "v_proj")) or parameter.shape[0] in (heads, heads * model.config.head_dim):
                rows = parameter.unflatten(0, (heads // times, times, -1))
                parameter.copy_(rows[:, :1].expand_as(rows).reshape(parameter.shape))
        for name, module in model.named_modules():
            if name.endswith("k_layernorm") and hasattr(module, "norms"):
                for head, norm in enumerate(module.norms):
                    norm.weight.copy_(module.norms[head - head % times].weight)


def save_tokenizer(path: Path, vocabulary: int = 96) -> None:
    """A character-level tokenizer with `vocabulary` ids, BOS 1, EOS 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {chr(32 + i): 4 + i for i in range(vocabulary - 5)}
    backend = Tokenizer(models.WordLevel({**ids, "\n": vocabulary - 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(path)
