"""Processes that were launched together share a healing alone."""

from pathlib import Path

import pytest
from written import Convert, Make, refused

import convert as api
from attention.errors import Refusal

LAUNCHED = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_all_else_takes_one_process(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    refused(convert("plan", checkpoint()), 2, "convert plan runs in one process, not in 2")
    with pytest.raises(Refusal, match="a conversion runs in one process, not in 2"):
        api.mqa(checkpoint(), tmp_path / "out", method="mean")
    with pytest.raises(Refusal, match="a sweep runs in one process, not in 2"):
        api.sweep(checkpoint(), tmp_path / "all", evaluate=["some words"], groups=[2], methods=["mean"])
