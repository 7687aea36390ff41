"""The family of a model type that has no row, as experiments find it (`convert.families.reading.experiments`)."""

from dataclasses import dataclass, replace
from typing import Any

from attention.record import Scoring
from attention.rope import Pairing, Rotary
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

    pairing: Pairing | None = None
    partial: bool = False
    backwards: bool = False
    window: str | None = None
    cap: bool = False
    scale: float = 1.0


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

    def rotary(self, layer: int) -> Rotary | None:
        reading = self.reading(layer)
        if reading.pairing is None:
            return None
        found = Projections.rotary(replace(self, pairing=reading.pairing, partial_rotary=reading.partial), layer)
        return found.backwards if found and reading.backwards else found

    def window(self, layer: int) -> int | None:
        field = self.reading(layer).window
        return None if field is None else int(getattr(self.decoder, field))

    def scoring(self, layer: int) -> Scoring:
        return Scoring(None, self.window(layer), getattr(self.decoder, SOFTCAP) if self.reading(layer).cap else None)
