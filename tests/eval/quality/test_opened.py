"""Models stay loaded from one part of a command to the next."""

from collections.abc import Callable
from pathlib import Path

import pytest

from eval.inputs.source import Source
from eval.quality import opened
from eval.quality.opened import Opened


def test_a_model_is_loaded_once_until_its_weights_change(checkpoint: Callable[..., Path], loaded: list[str]) -> None:
    source = Source.parse(str(checkpoint()))
    with Opened() as models:
        with models(source) as first, models(source, "float32", "cpu") as second:
            assert first is second
        with models(source, "bfloat16", "cpu") as coarse:
            assert coarse is not first
        models.forget(source)
        with models(source) as third:
            assert third is not first
    assert loaded == [str(source.files)] * 3


def test_without_memory_only_models_in_use_stay(
    checkpoint: Callable[..., Path], loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "free_memory", lambda device: 0)
    one, other, third = (Source.parse(str(checkpoint(name=name))) for name in ("one", "other", "third"))
    with Opened() as models:
        with models(one), models(other):
            pass
        with models(other), models(third), models(other), models(one):
            pass
    assert loaded == [str(source.files) for source in (one, other, third, one)]
