"""For how many positions a result of MLA is calibrated, as its config.json says.

MLA keeps fewer rotary dims than its source has, and fits them to distances of so many tokens. Beyond these its text may become
garbage, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POSITIONS, OF_SOURCE, STATED = "calibrated_positions", "source_positions", "max_position_embeddings"  # keys of config.json


@dataclass(frozen=True)
class Calibrated:
    """A result that is calibrated for fewer positions than its source has. `str()` of it says so.

    Attributes:
        positions: Those that it is calibrated for.
        of: Those of its source.
        stated: What its config.json gives as its positions: `positions`, or `of` where RoPE depends on that number.
    """

    positions: int
    of: int
    stated: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Calibrated | None:
        """What a config.json, or a conversion.json, says; None if it says nothing."""
        found = [value for key in (POSITIONS, OF_SOURCE, STATED) if isinstance(value := values.get(key), int)]
        return cls(*found) if len(found) == 3 and found[0] < found[1] else None

    @classmethod
    def of_config(cls, config: Any) -> Calibrated | None:
        """What a transformers config says; None if it says nothing."""
        decoder = config.get_text_config(decoder=True)
        return cls.read({key: getattr(decoder, key, None) for key in (POSITIONS, OF_SOURCE, STATED)})

    def as_dict(self) -> dict[str, int]:
        """The inverse of `read`."""
        return {POSITIONS: self.positions, OF_SOURCE: self.of, STATED: self.stated}

    def __str__(self) -> str:
        said = f"calibrated for {self.positions:,} of its source's {self.of:,} positions: beyond, its text may become garbage"
        if self.stated == self.positions:
            return said
        return f"{said}; RoPE depends on max_position_embeddings, which stays {self.stated:,}: give engines {self.positions:,}"
