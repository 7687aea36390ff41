"""A model's own class around another decoder: the output class of MLA for decoders inside other models.

Classes that build their decoder by its type (llava and its like) take any; others, which have one of their own, take none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family, family_of
from convert.families.base import decoder_of
from convert.hosts import deepseek_v3
from convert.hosts.base import Host


class InsideClass(Host):
    """The class of a model with a decoder inside, which becomes one that a stock class holds.

    Args:
        inner: The output class of decoders alone.
    """

    def __init__(self, inner: Host) -> None:
        self.inner = inner
        self.name, self.served_by = f"its own class around {inner.name}", "no engine was tried"
        self.opened_by, self.remarks, self.replaces = inner.opened_by, inner.remarks, inner.replaces
        self.families = frozenset()

    def layout(self, family: Family) -> Family:
        return self.inner.layout(family).inside(family.path, family.config)

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        if not family.path:
            return "the class is for decoders inside other models, of types that are also read alone"
        if reason := self.inner.refuses(alone(family), target):
            return reason
        raw = {**family.config.to_dict(), "text_config": family.decoder.to_dict()}
        made = decoder_of(self.sized(raw, family, target))
        if made.model_type != self.inner.layout(family).model_type:
            return f"the class of {family.model_type} always builds {made.model_type} as its decoder"
        return None

    def reserved(self, kv_lora_rank: int) -> int:
        return self.inner.reserved(kv_lora_rank)

    def latent_size(self, kv_lora_rank: int) -> float | None:
        return self.inner.latent_size(kv_lora_rank)

    def notes(self, family: Family) -> tuple[str, ...]:
        return self.inner.notes(alone(family))

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        return {**raw, "text_config": self.inner.config(raw["text_config"], alone(family), target, rotary)}


def alone(family: Family) -> Family:
    """The family of the decoder inside a model, without what is around it."""
    return family_of(family.decoder.model_type).of(family.decoder)


HOST = InsideClass(deepseek_v3.HOST)
