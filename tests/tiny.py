"""Tiny random models with nothing at zero or one, so that nothing can hide."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from convert.families import Family

# As in published models: far more tokens than a text has, of no round number, and more than the tokenizer has.
VOCABULARY, TOKENS = 331, 96
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": True,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16}  # fmt: skip
# RoPE of each type, for heads of 8 dims.
ROPES: dict[str, dict[str, Any]] = {
    kind: {"rope_type": kind, "rope_theta": 1e4} | parameters for kind, parameters in {
        "default": {"rope_theta": 5000.0},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
        "longrope": {"factor": 4.0, "original_max_position_embeddings": 32, "short_factor": [1.0, 1.1, 1.3, 1.7],
                     "long_factor": [2.0, 3.0, 5.0, 7.0]},
    }.items()
}  # fmt: skip
# As kvfold writes latent attention: biases, dense layers alone, and a norm that constants switch off (`neutralise`).
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "attention_bias": True, "rope_interleave": True, "n_routed_experts": 1, "num_mtp_layers": 0,
}  # fmt: skip
# MiniCPM3's class scales layers and logits: by nothing here.
SCALES: dict[str, dict[str, Any]] = {"minicpm3": {"scale_emb": 8.0, "scale_depth": None, "dim_model_base": None}}
OF_LATENT = ("deepseek_v3", "minicpm3")
# As DeepSeek makes it: a latent norm that does something, a latent of the queries, experts behind the first layer.
NORMED: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_mtp_layers": 0,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
# Everything that a family can switch on: biases and QK-norms are where records go wrong.
SWITCHES = (
    "attention_bias", "bias", "use_bias", "use_qkv_bias", "qkv_bias", "attention_out_bias", "qk_layernorm", "use_qk_norm",
)  # fmt: skip
# In these the class does more than the record says (soft-capped logits), as `beyond` declares.
_UNLIKE = {"gemma2": {"attn_logit_softcapping": None}, "vaultgemma": {"attn_logit_softcapping": None}}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config of `model_type`; `changes` go over the defaults."""
    from transformers import AutoConfig

    from convert.families import FAMILIES

    values = SIZES | changes
    padding = 1 if model_type == "xglm" else values["vocab_size"] - 1  # xglm has a position for it
    values = {"pad_token_id": padding} | values
    if "moe" in model_type or model_type == "mixtral":
        values = _EXPERTS | values
    if model_type in OF_LATENT:
        every = {"num_key_value_heads": values["num_attention_heads"], "first_k_dense_replace": values["num_hidden_layers"]}
        values = values | LATENT | every | SCALES.get(model_type, {}) | changes
    if model_type == "deepseek_v2":
        values = values | NORMED | {"num_key_value_heads": values["num_attention_heads"]} | changes
    family = FAMILIES.get(model_type)
    if family is not None and family.has_heads and not family.shares_heads:  # its class ignores these
        values = {key: value for key, value in values.items() if key not in ("num_key_value_heads", "head_dim")}
        own = dict.fromkeys(("ffn_dim", "n_inner", "ffn_hidden_size"), 32)
        own |= {"rotary_dim": 4, "multi_query": False, "n_head": values["num_attention_heads"]}
        kinds = {"attention_types": [[["local"], 1], [["global"], values["num_hidden_layers"] - 1]]}
        values = own | (kinds if model_type == "gpt_neo" else {}) | values
    if model_type.startswith("gemma") or model_type == "vaultgemma":
        values = {"query_pre_attn_scalar": 4} | values
    return AutoConfig.for_model(model_type, **values)


def published(model_type: str) -> dict[str, Any]:
    """What configs of published models say of their tokens: each family has one kind of these, in turn."""
    from convert.families import FAMILIES

    number, last = list(FAMILIES).index(model_type), VOCABULARY - 1
    kinds: list[dict[str, Any]] = [
        {"eos_token_id": [2, last - 1]},
        {"pad_token_id": None, "tie_word_embeddings": True},
        {"pad_token_id": None, "bos_token_id": None, "eos_token_id": last},
        {"bos_token_id": None, "eos_token_id": [last - 2, last - 1, 3], "tie_word_embeddings": True},
    ]
    found = kinds[number % len(kinds)]
    needed = {"xglm": "pad_token_id", "cwm": "bos_token_id"}  # their classes do not do without
    return {key: value for key, value in found.items() if key != needed.get(model_type)}


def save_published(model: Any, path: Path) -> None:
    """As published models lie on disk: bf16 in shards, a config of older years, and what tools for fine-tuning leave there."""
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size="40KB")
    file = path / "config.json"
    raw = json.loads(file.read_text())
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type") == "default":
        del raw["rope_parameters"]
        del rope["rope_type"]
        raw |= {"rope_scaling": None} | rope  # the base, and the share of dims that rotate
    raw |= {"unsloth_version": "2026.1", "unsloth_fixed": True, "quantization_config": None, "use_cache": False,
            "attention_dropout": 0.1, "torch_dtype": raw.pop("dtype"), "transformers_version": "4.41.2"}  # fmt: skip
    file.write_text(json.dumps(raw))


def switched(model_type: str, on: bool, **changes: Any) -> Any:
    """A config with everything on or off, or as it is where its family cannot be read so."""
    from convert.families import family_of

    changes = _UNLIKE.get(model_type, {}) | changes
    if model_type in OF_LATENT:
        return tiny_config(model_type, **changes)
    config = tiny_config(model_type, **dict.fromkeys(SWITCHES, on), **changes)
    return tiny_config(model_type, **changes) if family_of(model_type).of(config).unreadable else config


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A causal LM with random weights, biases and norm gains; of latent attention, with the norm that families can read."""
    from convert.families import FAMILIES
    from convert.families.latent import LatentLayout

    model = random_model(config, seed)
    family = FAMILIES.get(config.model_type)
    if isinstance(family, LatentLayout) and family.of(config) == family:
        from convert.families.latent import constants

        for layer in model.model.layers:
            with torch.no_grad():  # only the constants have biases
                layer.self_attn.kv_a_proj_with_mqa.bias[: config.kv_lora_rank] = 0
        neutralise(model, constants(config.kv_lora_rank))
        if config.q_lora_rank:
            carry_query_biases(model)
    return model


def random_model(config: Any, seed: int = 0) -> Any:
    """A causal LM in which nothing is zero or one, so that nothing can hide."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator, unread = (torch.Generator().manual_seed(number) for number in (seed, seed + 1))
    with torch.no_grad():
        for parameter in model.parameters():
            # Tokens that no text has are drawn apart: whatever their number, all else is the same.
            rows = TOKENS if len(parameter) == config.vocab_size else len(parameter)
            for part, source in ((parameter[:rows], generator), (parameter[rows:], unread)):
                part.copy_(torch.randn(part.shape, generator=source) * 0.3)
    return model


def neutralise(model: Any, constants: Sequence[float], size: float | None = None) -> None:
    """Switch the norm of a latent off: its first channels become constants (Σ c² = R) times `size`; None for kvfold's."""
    from convert.families.latent import level

    size = size or level(constants)
    for layer in model.model.layers:
        down, norm = layer.self_attn.kv_a_proj_with_mqa, layer.self_attn.kv_a_layernorm
        with torch.no_grad():
            norm.weight.fill_(size)
            for channel, constant in enumerate(constants):
                norm.weight[channel], down.weight[channel], down.bias[channel] = 0, 0, constant * size


def carry_query_biases(model: Any) -> None:
    """Make the latent of queries twice the input and constants (1, then 7² + 5² + 2² + 1²: a rank of 80), as kvfold does."""
    for layer in model.model.layers:
        down, norm = layer.self_attn.q_a_proj, layer.self_attn.q_a_layernorm
        with torch.no_grad():
            down.weight.zero_().fill_diagonal_(2)
            down.bias.zero_()[-5:] = torch.tensor([1.0, 7.0, 5.0, 2.0, 1.0]) * 2.0**13
            norm.weight.fill_(2.0**13)[-5:] = torch.tensor([1.0, 0, 0, 0, 0])


def layer_tensors(model: Any, family: Family, layer: int) -> dict[str, torch.Tensor]:
    """Those of a layer's attention."""
    state = model.state_dict()
    return {name: state[name] for name in family.of(model.config).shapes(layer)}


def duplicate_kv_heads(model: Any, times: int) -> None:
    """Make runs of `times` KV heads equal, everywhere in the model: weights, biases, gains per head."""
    from convert.families.reading import family_for

    family, state = family_for(model.config), model.state_dict()
    first = torch.arange(family.spec.num_kv_heads) // times * times
    for layer in range(model.config.num_hidden_layers):
        record = family.split({name: state[name] for name in family.shapes(layer)}, layer)
        parts = {name: getattr(record, name) for name in ("k", "v", "k_bias", "v_bias")}
        changed: dict[str, Any] = {name: tensor[first] for name, tensor in parts.items() if tensor is not None}
        if record.k_norm is not None and record.k_norm.per_head_gains:
            gains = {name: getattr(record.k_norm, name) for name in ("gain", "bias")}
            own = {name: tensor[first] for name, tensor in gains.items() if tensor is not None}
            changed["k_norm"] = dataclasses.replace(record.k_norm, **own)
        with torch.no_grad():
            for name, tensor in family.join(dataclasses.replace(record, **changed), family.spec, layer).items():
                state[name].copy_(tensor)


def save_tokenizer(path: Path, vocabulary: int = TOKENS) -> None:
    """A character-level tokenizer with `vocabulary` ids, BOS 1, EOS 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {chr(32 + i): 4 + i for i in range(vocabulary - 5)}
    backend = Tokenizer(models.WordLevel({**ids, "\n": vocabulary - 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    ).save_pretrained(path)


def saved(model: Any, path: Path) -> Path:
    """A checkpoint, with a tokenizer."""
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def sentencepiece_style(corpus: list[str]) -> Any:
    """Llama's kind of tokenizer: BPE with byte fallback over the whole text at once, nothing split beforehand."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=1500, special_tokens=special + byte_tokens, show_progress=False)
    )
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
