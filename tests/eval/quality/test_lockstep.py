"""Models are scored beside their source, whose score does not depend on how many others there are."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from written import Make

from eval.inputs.loading import load
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.quality import lockstep
from eval.quality.evaluation import report_of
from eval.quality.settings import EvaluationSettings

TEXT = Text("novel.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 5)
SHORT = EvaluationSettings(contexts=(32, 16), device="cpu")
SCORED = 370 // 32 * 31 + 370 // 16 * 15  # at both contexts


@pytest.fixture
def models(checkpoint: Make) -> list[Source]:
    """A source and three others."""
    paths = [checkpoint(num_hidden_layers=1)]
    paths += [checkpoint(name=f"m{n}", num_key_value_heads=1 + n % 2, num_hidden_layers=1) for n in range(3)]
    return [Source.parse(str(path)) for path in paths]


@pytest.mark.parametrize(("small", "expected"), [(0, [0, 1, 1, 1]), (2.5, [0, 1, 2, 1]), (3, [0, 1, 2, 3])])
def test_models_are_in_memory_together_only_while_they_are_small(
    small: float, expected: list[int], models: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the groups, the report is the same."""
    whole = report_of(models, TEXT, SHORT)
    loaded, alive = list[weakref.ref[Any]](), list[int]()
    stages: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def watched(source: Source, *how: str) -> Iterator[Any]:
        alive.append(sum(reference() is not None for reference in loaded))
        with load(source, *how) as model:
            loaded.append(weakref.ref(model))
            yield model

    size = max((model.files / "model.safetensors").stat().st_size for model in models)
    monkeypatch.setattr(lockstep, "_SMALL", small * size)

    def told(name: str, done: int, total: int, unit: str) -> None:
        stages[name] = done, total

    found = report_of(models, TEXT, SHORT, progress=told, opening=watched)
    assert found == whole
    assert alive == expected, "models that are there while another is loaded"
    assert set(stages.values()) == {(SCORED, SCORED)}
    assert len(stages) == 4 - max(expected)
