"""Fixtures of kernels' tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated without a value is NaN, or a number that no index should be."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        out = empty(*shape, **options)
        return out.fill_(torch.nan if out.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)
