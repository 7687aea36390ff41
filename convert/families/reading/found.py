"""The family of a model type that has no row, as experiments find it (`convert.families.reading.experiments`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from attention import rope
from attention.scoring import Scoring
from convert.families.base import SOFTCAP, Traits
from convert.families.heads import Projections
from convert.families.reading.twin import kinds


@dataclass(frozen=True)
class Reading:
    """What a kind of layer computes.

    Attributes:
        pairing: Of its RoPE; None without.
        partial: As in `attention.rope.from_config`.
        backwards: Whether pairs turn by negative angles.
        window: The config field that says how many tokens it sees; None if it sees all.
        cap: Whether its logits are capped at `attn_logit_softcapping`.
        scale: Of its logits.
    """

    pairing: rope.Pairing | None = None
    partial: bool = False
    backwards: bool = False
    window: str | None = None
    cap: bool = False
    scale: float = 1.0

    def rotary(self, config: Any, head_dim: int, layer: int) -> rope.Rotary | None:
        if self.pairing is None:
            return None
        types = getattr(config, "layer_types", None)
        found = rope.from_config(config, head_dim, self.pairing, types[layer] if types else None, self.partial)
        return found.backwards if self.backwards else found

    def scoring(self, config: Any) -> Scoring:
        window = None if self.window is None else int(getattr(config, self.window))
        return Scoring(None, window, getattr(config, SOFTCAP) if self.cap else None)


@dataclass(frozen=True)
class Found(Projections):
    """A family that experiments have found for one config, and for what becomes of it.

    Attributes:
        lists: The names of the config's lists that have an entry for each layer.
        readings: What each kind of layer computes (`convert.families.reading.twin.kinds`).
        far_queries: What the queries of the last positions are multiplied by, which no record says; None for nothing.
    """

    lists: tuple[str, ...] = ()
    readings: tuple[tuple[tuple[Any, ...], Reading], ...] = ()
    far_queries: float | None = None
    is_row: bool = False

    @property
    def traits(self) -> Traits:
        traits, far = super().traits, self.far_queries
        if far is None:
            return traits
        return replace(traits, extra_features={**traits.extra_features, "far queries times": round(far, 2)})

    def reading(self, layer: int) -> Reading:
        return dict(self.readings)[kinds(self.config, self.lists)[layer]]

    def rotary(self, layer: int) -> rope.Rotary | None:
        return self.reading(layer).rotary(self.decoder, self.spec.head_dim, layer)

    def window(self, layer: int) -> int | None:
        return self.scoring(layer).window

    def scoring(self, layer: int) -> Scoring:
        return self.reading(layer).scoring(self.decoder)
