"""The registry of families: every model type that kvfold can read, by its name in config.json."""

from __future__ import annotations

from attention.errors import Refusal
from convert.families import latent, separate, stacked
from convert.families.base import Family

FAMILIES: dict[str, Family] = {row.model_type: row for row in (*separate.ROWS, *stacked.ROWS, latent.FAMILY)}

__all__ = ["FAMILIES", "Family", "family_of"]


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`.

    Raises:
        Refusal: No family has that model type; the hint lists the known ones.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise Refusal(
        f"model type {model_type!r} is not supported",
        hint=f"supported: {', '.join(sorted(FAMILIES))} (see `convert families`)",
    )
