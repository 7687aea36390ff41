"""Sizes of batches, and the dtype of products."""

from __future__ import annotations

import pytest
from refitting import in_full


@pytest.fixture(params=[48, 4096, 5], ids=["7 blocks by 4", "all at once", "blocks longer than a batch"])
def batched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("convert.calibration.stream._TOKENS", request.param)
    return int(request.param)


@pytest.fixture(name="in_full")
def multiplied_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits multiply in fp32."""
    in_full(monkeypatch.setattr)
