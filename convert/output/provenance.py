"""Writes conversion.json, the provenance of a checkpoint, and README.md, its model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """The command that repeats a result from any directory; OUTPUT is left out.

    Attributes:
        command: Its name.
        options: Its options by name, and what it reads.
    """

    command: str
    options: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The entry `recipe` of conversion.json."""
        return {self.command: self.options}


def versions() -> dict[str, str]:
    """The versions of this package and of those whose arithmetic affects the result."""
    return {name: version(name) for name in ("kvfold", "torch", "transformers", "safetensors")}


def write_provenance(path: Path, provenance: Mapping[str, Any]) -> None:
    """Write conversion.json into a checkpoint's directory."""
    (path / "conversion.json").write_text(json.dumps(provenance, indent=2, allow_nan=False) + "\n", encoding="utf-8")
