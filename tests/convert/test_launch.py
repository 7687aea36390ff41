"""Processes that were launched together: one of them converts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import Make

import convert as api
from attention.errors import Refusal

LAUNCHED = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SHARING = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "yes"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make this process one of two."""

    def become(rank: int) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        for name, value in (LAUNCHED | SHARING | {"RANK": str(rank), "LOCAL_RANK": str(rank)}).items():
            monkeypatch.setenv(name, value)

    return become


def test_the_first_process_converts_and_heals(
    launched: Callable[[int], None], checkpoint: Make, convert: Callable[..., Any], words: Path, tmp_path: Path
) -> None:
    given = "--text", words, "--calibration-tokens", 256, "--calibration-context", 32, "--heal", 256
    source = checkpoint()
    launched(1)
    other = convert("mqa", source, tmp_path / "out", *given)
    assert (other.exit_code, other.stdout, other.stderr) == (0, "", "")
    assert not (tmp_path / "out").exists()
    launched(0)
    first = convert("mqa", source, tmp_path / "out", *given)
    assert first.exit_code == 0, first.stderr
    assert first.stderr.startswith("warning: mqa runs in the first of 2 launched processes\n")
    assert (tmp_path / "out" / "conversion.json").exists()


def test_the_api_takes_one_process(launched: Callable[[int], None], checkpoint: Make, tmp_path: Path) -> None:
    launched(0)
    with pytest.raises(Refusal, match="a conversion runs in one process, not in 2"):
        api.mqa(checkpoint(), tmp_path / "out", method="mean")
    with pytest.raises(Refusal, match="a sweep runs in one process, not in 2"):
        api.sweep(checkpoint(), tmp_path / "all", evaluate=["some words"], groups=[2], methods=["mean"])
