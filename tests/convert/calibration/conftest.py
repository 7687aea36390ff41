"""Sizes of batches."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[48, 4096, 5], ids=["7 blocks by 4", "all at once", "blocks longer than a batch"])
def batched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("convert.calibration.stream._TOKENS", request.param)
    return int(request.param)
