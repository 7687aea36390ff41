"""Texts to calibrate on, and what shortens conversions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from written import characters

WORDS = ("cat", "mat", "sat", "flat", "once", "upon", "a", "time", "there", "was", "the", "and", "of", "moon", "tree", "ran")


@pytest.fixture(scope="session")
def spoken() -> str:
    """Words in an order that never repeats, 6,000 characters: 46 blocks of the tiny models' 128 positions."""
    drawn = torch.randint(len(WORDS), (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    return " ".join(WORDS[i] for i in drawn)[:6000]


@pytest.fixture
def words(spoken: str, tmp_path: Path) -> Path:
    """A file of them."""
    path = tmp_path / "text.txt"
    path.write_text(spoken)
    return path


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """Characters in an order that never repeats."""
    return characters(tmp_path / "text.txt")


@pytest.fixture
def in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits multiply in fp32, whatever the machine does faster."""
    for part in ("keys", "values"):
        monkeypatch.setattr(f"convert.calibration.{part}.rough", lambda device: torch.float32)


@pytest.fixture
def on(letters: Path) -> list[Any]:
    """The options that name it, for a few short blocks."""
    return ["--text", letters, "--calibration-tokens", 256, "--calibration-context", 32]
