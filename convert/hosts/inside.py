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
from convert.hosts.deepseek_v3 import HOST as DEEPSEEK
from convert.hosts.deepseek_v3 import DeepseekV3


class InsideClass(DeepseekV3):
    """The class of a model with a decoder inside, which becomes one that `deepseek_v3` holds."""

    name = f"its own class around {DEEPSEEK.name}"
    served_by = "no engine was tried"
    runs = frozenset({"transformers"})
    families = ()

    def layout(self, family: Family) -> Family:
        return DEEPSEEK.layout(family).inside(family.path, family.config)

    def refuses(self, family: Family, target: AttentionSpec) -> str | None:
        if not family.path:
            return "the class is for decoders inside other models, of types that are also read alone"
        if reason := DEEPSEEK.refuses(alone(family), target):
            return reason
        raw = {**family.config.to_dict(), "text_config": family.decoder.to_dict()}
        made = decoder_of(self.sized(raw, family, target))
        if made.model_type != DEEPSEEK.name:
            return f"the class of {family.model_type} always builds {made.model_type} as its decoder"
        return None

    def notes(self, family: Family) -> tuple[str, ...]:
        return DEEPSEEK.notes(alone(family))

    def config(self, raw: Mapping[str, Any], family: Family, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        return {**raw, "text_config": DEEPSEEK.config(raw["text_config"], alone(family), target, rotary)}


def alone(family: Family) -> Family:
    """The family of the decoder inside a model, without what is around it."""
    return family_of(family.decoder.model_type).of(family.decoder)


HOST = InsideClass()
