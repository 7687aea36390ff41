"""The source's own class with fewer KV heads: the output class of GQA and MQA if its config can say so (`Family.sharing`).

Any class can hold what has as many KV heads as the source: it is a copy.

Everything else that the class does (windows, soft-capping, MoE, …) stays the same, because nothing else changes.
"""

import copy
from collections.abc import Mapping
from typing import Any

from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import FAMILIES, Family
from convert.hosts.base import Host

# Families whose results were run in llama.cpp. Its classes of some others (phi) have as many KV heads as query heads.
LLAMA_CPP = ("llama",)


class SourceClass(Host):
    """The source's own class: the keys of its config that say how heads share change, and the tensors that depend on them.

    Args:
        families: As in `Host`.
    """

    name = "its own class"
    served_by = "vLLM, SGLang and llama.cpp serve it if they serve the source"
    opened_by = (
        "transformers, and any other software that reads the number of KV heads from config.json, loads it without kvfold."
    )
    remarks = (
        "When it is compiled, with a static cache or with padding, most classes of transformers 5.23 repeat keys and values\n"
        "for every query head at every token. kvfold's `attention` package does not:\n"
        '`model = attention.load("path/to/this/directory")`, or `attention.pack(model)` for a loaded model with sdpa\n'
        "attention.",
    )
    replaces = "belonged to a KV head that was merged into another"
    keeps_sinks = True

    def __init__(self, families: frozenset[str]) -> None:
        self.families = families

    def engines(self, family: Family) -> frozenset[str]:
        sinks = family.config is not None and family.traits.sinks
        # MQA by keys of its own, sinks, and what experiments found were not tried in engines.
        if not family.shares_heads or not family.is_row or sinks:
            return frozenset({"transformers"})
        return frozenset({"transformers", "vllm", *(["llama.cpp"] if family.model_type in LLAMA_CPP else [])})

    def layout(self, family: Family) -> Family:
        return family

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        return None if target == family.spec else family.unshared(target)

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        changes = _changes(family, target)
        if isinstance(inner := raw.get("text_config"), dict):  # of a model with a decoder inside
            return {**raw, "text_config": {**inner, **changes}}
        return {**raw, **changes}

    def sized(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec) -> Any:
        changed = copy.deepcopy(family.config)
        for field, value in _changes(family, target).items():
            setattr(changed.get_text_config(decoder=True), field, value)
        return changed


def _changes(family: Family, target: AttentionSpec) -> dict[str, Any]:
    """The fields of the config that change; none where a class that ignores them is copied: they would mislead others."""
    return {} if not family.shares_heads and target == family.spec else family.sharing(target)


_SHARING = frozenset(name for name, family in FAMILIES.items() if family.shares_heads)
HOST = SourceClass(_SHARING)
MQA_HOST = SourceClass(_SHARING | {"falcon"})  # which shares one KV head by keys of its own (`Family.sharing`)
