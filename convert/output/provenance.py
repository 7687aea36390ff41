"""Writes conversion.json, the provenance of a checkpoint, and README.md, its model card."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
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


@dataclass(frozen=True)
class Clock:
    """Notes when a run began."""

    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    _monotonic: float = field(default_factory=time.monotonic)

    def run(self, output: Path, source_files: Mapping[str, Any]) -> dict[str, Any]:
        """The entry `run` of conversion.json: everything that differs between runs.

        Args:
            output: OUTPUT.
            source_files: The fingerprints of the source's weights.
        """
        return {
            "output": str(output),
            "source_files": source_files,
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._monotonic, 3),
            "machine": platform.node(),
        }


def versions() -> dict[str, str]:
    """The versions of this package and of those whose arithmetic affects the result."""
    return {name: version(name) for name in ("kvfold", "torch", "transformers", "safetensors")}


def write_provenance(path: Path, provenance: Mapping[str, Any]) -> None:
    """Write conversion.json into a checkpoint's directory."""
    (path / "conversion.json").write_text(json.dumps(provenance, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_card(path: Path, card: str) -> None:
    """Write README.md into a checkpoint's directory."""
    (path / "README.md").write_text(card, encoding="utf-8")
