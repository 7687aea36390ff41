"""The source's own class with fewer KV heads: the output class of GQA and MQA if it knows `num_key_value_heads`.

Any class can hold what has as many KV heads as the source: it is a copy.

Everything else that the class does (windows, soft-capping, MoE, …) stays the same, because nothing else changes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convert.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from attention.rope import Rotary
    from attention.spec import AttentionSpec
    from convert.families import Family


class SourceClass:
    """The source's own class: two keys of its config change, and the tensors that depend on them."""

    name = "its own class"
    loads_in = "transformers"
    served_by = "vLLM, SGLang and llama.cpp serve it if they serve the source"
    engines = frozenset({"transformers", "vllm", "llama.cpp"})  # the last two if they run the source
    opened_by = "transformers, and any other software that reads `num_key_value_heads`, loads it without kvfold."
    remarks = (
        "When it is compiled, with a static cache or with padding, transformers 5.23 repeats keys and values for every query\n"
        'head at every token. kvfold\'s `attention` package does not: `model = attention.load("path/to/this/directory")`, or\n'
        "`attention.pack(model)` for a loaded model with sdpa attention.",
    )
    replaces = "belonged to a KV head that was merged into another"
    families: frozenset[str] = frozenset(name for name, family in FAMILIES.items() if family.shares_heads)
    loading: Mapping[str, Any] = {}
    code: tuple[Path, ...] = ()

    def layout(self, family: Family) -> Family:
        return family

    def refuses(self, family: Family, config: Any, target: AttentionSpec, dtype: str) -> str | None:
        copied = target == family.spec(config) and not family.needs_code
        if family.shares_heads or copied:
            return None
        return f"{family.model_type} ignores num_key_value_heads, so its heads cannot share"

    def reserved(self, kv_lora_rank: int) -> int:
        return 0

    def notes(self, config: Any) -> tuple[str, ...]:
        return ()

    def config(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        if config.model_type not in self.families:  # only copied, and a stray key would mislead others
            return dict(raw)
        # Both are written even if they equal a default, since defaults differ between classes and engines.
        return {**raw, "num_key_value_heads": target.num_kv_heads, "head_dim": target.head_dim}

    def sized(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec) -> Any:
        changed = copy.deepcopy(config)
        changed.num_key_value_heads, changed.head_dim = target.num_kv_heads, target.head_dim
        return changed


HOST = SourceClass()
