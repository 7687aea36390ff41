"""The dtype of products."""

from __future__ import annotations

import pytest
from refitting import in_full


@pytest.fixture(name="in_full")
def multiplied_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits multiply in fp32."""
    in_full(monkeypatch.setattr)
