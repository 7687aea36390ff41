"""The source's own class, with fewer KV heads: the host of GQA and MQA wherever that class knows `num_key_value_heads`.

Whatever else the class does (windows, soft-capping, MoE, …) stays as it was, because nothing else changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attention.record import Attention, FactoredAttention
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family
from eval.capacity import with_kv_heads


class SourceClass:
    """Changes two keys of the config, and the tensors that follow from them."""

    name = "its own class"
    loads_in = "transformers"
    opened_by = "transformers, and whatever else reads `num_key_value_heads`, loads it without kvfold."
    remarks = (
        "Compiled, over a static cache or with padding, transformers 5.23 repeats keys and values for every query head at\n"
        'every token. kvfold\'s `attention` package does not: `model = attention.load("path/to/this/directory")`, or\n'
        "`attention.pack(model)` for a model that is loaded, if it attends through sdpa.",
    )
    replaces = "belonged to a KV head that was merged into another"
    families: frozenset[str] | None = None

    def model_type(self, family: Family) -> str:
        return family.model_type

    def module(self, family: Family, layer: int) -> str:
        return family.module(layer)

    def output(self, family: Family, layer: int) -> str:
        return family.output(layer)

    def drops(self, name: str) -> str | None:
        return None

    def refuses(self, family: Family, config: Any, target: AttentionSpec, dtype: str) -> str | None:
        return None

    def reserved(self, kv_lora_rank: int) -> int:
        return 0

    def config(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        # Both are written even where they equal a default, since the defaults differ between classes and engines.
        return {**raw, "num_key_value_heads": target.num_kv_heads, "head_dim": target.head_dim}

    def shapes(self, family: Family, config: Any, target: AttentionSpec, layer: int) -> dict[str, tuple[int, ...]]:
        return family.shapes(with_kv_heads(config, target), layer)

    def tensors(
        self, family: Family, attention: Attention | FactoredAttention, target: AttentionSpec, layer: int
    ) -> dict[str, torch.Tensor]:
        assert isinstance(attention, Attention)
        return family.join(attention, layer)


HOST = SourceClass()
