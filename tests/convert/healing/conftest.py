"""A text to heal on, and a model to heal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from convert import mqa


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "train.txt"
    generator = torch.Generator().manual_seed(3)
    letters = torch.randint(32, 126, (6000,), generator=generator).tolist()
    path.write_text("".join(map(chr, letters)), encoding="utf-8")
    return path


@pytest.fixture
def converted(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    mqa(checkpoint("llama"), tmp_path / "mqa", method="mean")
    return tmp_path / "mqa"
