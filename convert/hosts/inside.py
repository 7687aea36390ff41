"""A model's own class around another decoder: the output class of MLA for decoders inside other models.

Classes that build their decoder by its type (llava and its like) take any; others, which have one of their own, take none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convert.families.reading.inside import Inside, decoder_of
from convert.hosts import deepseek_v3
from convert.hosts.base import Host

if TYPE_CHECKING:
    from attention.rope import Rotary
    from attention.spec import AttentionSpec
    from convert.families import Family


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
        assert isinstance(family, Inside), "the class is for decoders inside other models"
        return family.holding(self.inner.layout(family.inner))

    def refuses(self, family: Family, config: Any, target: AttentionSpec) -> str | None:
        if not isinstance(family, Inside):
            return "the class is for decoders inside other models, of types that are also read alone"
        if reason := self.inner.refuses(family.inner, decoder_of(config), target):
            return reason
        made = decoder_of(self.sized({**config.to_dict(), "text_config": decoder_of(config).to_dict()}, config, target))
        if made.model_type != self.inner.layout(family.inner).model_type:
            return f"the class of {config.model_type} always builds {made.model_type} as its decoder"
        return None

    def reserved(self, kv_lora_rank: int) -> int:
        return self.inner.reserved(kv_lora_rank)

    def latent_size(self, kv_lora_rank: int) -> float | None:
        return self.inner.latent_size(kv_lora_rank)

    def notes(self, config: Any) -> tuple[str, ...]:
        return self.inner.notes(decoder_of(config))

    def config(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        return {**raw, "text_config": self.inner.config(raw["text_config"], decoder_of(config), target, rotary)}


HOST = InsideClass(deepseek_v3.HOST)
