"""kvfold's class: the output class of GQA and MQA for sources whose class ignores `num_key_value_heads`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attention.models import CODE, MODEL_TYPE, register
from convert.families import FAMILIES
from convert.families.kvfold import KvfoldProjections

if TYPE_CHECKING:
    from pathlib import Path

    from attention.rope import Rotary
    from attention.spec import AttentionSpec
    from convert.families import Family

_OUTER = ("architectures", "auto_map", "dtype", "torch_dtype")  # keys that only the outermost config has


class Kvfold:
    """The class of `attention.models`: the source's config inside, and what its attention became."""

    name = MODEL_TYPE
    loads_in = "transformers, with kvfold's code"
    opened_by = (
        "transformers ≥ 5.23 loads it with the code beside the weights, and so its tokenizer: give\n"
        '`trust_remote_code=True` to both. Where kvfold is installed, `attention.load("path/to/this/directory")` does without.'
    )
    loading: Mapping[str, Any] = {"trust_remote_code": True}
    remarks = (
        "kvfold made this class, because the source's class cannot share KV heads. vLLM, SGLang and llama.cpp do not know it.",
    )
    replaces = "became q_proj, k_proj, v_proj and o_proj"
    families: frozenset[str] = frozenset(
        name for name, family in FAMILIES.items() if family.has_heads and not family.shares_heads
    )
    code: tuple[Path, ...] = (CODE,)

    def layout(self, family: Family) -> Family:
        return family if family.needs_code else KvfoldProjections(family)

    def refuses(self, family: Family, config: Any, target: AttentionSpec, dtype: str) -> str | None:
        if family.shares_heads:
            return "it is for sources whose class cannot share KV heads"
        traits = family.traits(config)
        if traits.qk_norm:
            return "queries and keys are normalised (QK-norm), which its attention does not do"
        for field, value in traits.beyond.items():
            return f"config.json sets {field} to {value}, which its attention does not do"
        rotaries = (family.rotary(config, layer) for layer in range(target.num_layers))
        if any(rotary is not None and rotary.pairing != "half" for rotary in rotaries):
            return "RoPE pairs neighbouring dims, and its attention pairs those of two halves"
        return None

    def reserved(self, kv_lora_rank: int) -> int:
        return 0

    def notes(self, config: Any) -> tuple[str, ...]:
        return ()

    def config(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        if config.model_type == MODEL_TYPE:
            return {**raw, "text_config": {**raw["text_config"], "num_key_value_heads": target.num_kv_heads}}
        family = FAMILIES[config.model_type]
        traits, inner = family.traits(config), {key: value for key, value in raw.items() if key not in _OUTER}
        named = {key: raw[key] for key in ("dtype", "torch_dtype") if key in raw}
        return {
            "architectures": ["KvfoldForCausalLM"],
            "model_type": MODEL_TYPE,
            "auto_map": {
                "AutoConfig": f"{CODE.stem}.KvfoldConfig",
                "AutoModelForCausalLM": f"{CODE.stem}.KvfoldForCausalLM",
            },
            **named,
            "tie_word_embeddings": config.tie_word_embeddings,
            "attention_path": family.attention_path,
            "qkv_bias": traits.qkv_bias,
            "o_bias": traits.o_bias,
            "scaling": family.scale(config),
            "text_config": {**inner, "num_key_value_heads": target.num_kv_heads},
        }

    def sized(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec) -> Any:
        from attention.models.modeling_kvfold import KvfoldConfig

        register()
        return KvfoldConfig(**self.config(raw, config, target, None))


HOST = Kvfold()
