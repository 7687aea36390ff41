"""What the bytes of a conversion depend on: a run with other inputs is not resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from written import Make, edit

from convert.execute.inputs import inputs_of
from convert.methods import load_grouped
from convert.output.destination import Output
from convert.planning.base import Request
from convert.planning.calibration import CalibrationOptions, GivenTexts
from convert.planning.grouped import plan_grouped
from convert.planning.texts import texts_of
from eval.inputs.source import Source

TEXT = "a line of words, and another " * 20


def inputs(source: Path, groups: int = 2, method: str = "aligned", given: Any = TEXT, **options: Any) -> dict[str, Any]:
    """Of a conversion to fewer heads, with strings or files as its text."""
    text = CalibrationOptions(
        texts_of([given] if isinstance(given, str) else given, None), **{"tokens": 256, "context": 32} | options
    )
    request = Request(Source.parse(str(source)), Output(source.with_name("out")), text, "cpu")
    plan = plan_grouped(request, "gqa", groups, load_grouped(method))
    assert plan.calibration is not None
    return inputs_of(plan, GivenTexts.read(plan.source, plan.calibration))


def test_a_text_is_known_by_its_tokens_wherever_it_lies(checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.txt", "elsewhere/b.txt"):
        (tmp_path / name).write_text(TEXT)
    source = checkpoint()
    assert inputs(source) == inputs(source, given=tmp_path / "a.txt") == inputs(source, given=tmp_path / "elsewhere" / "b.txt")


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"groups": 1}, {"groups"}),
        ({"given": TEXT[::-1]}, {"calibration_hashes"}),
        ({"context": 16}, {"calibration_context", "calibration_hashes"}),
        ({"tokens": 128}, {"calibration_tokens", "calibration_hashes"}),
        ({"refit": False}, {"refit"}),
        ({"refine": 2}, {"refine"}),
        ({"method": "mean", "refit": True}, {"method"}),
        ({"heal": 640}, set()),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "differing",
)
def test_settings_and_text_are_inputs(changes: dict[str, Any], differing: set[str], checkpoint: Make) -> None:
    source = checkpoint()
    before, after = inputs(source), inputs(source, **changes)
    assert {key for key in before | after if before.get(key) != after.get(key)} == differing


def test_config_and_weights_are_inputs(checkpoint: Make) -> None:
    source = checkpoint()
    before = inputs(source)
    os.utime(source / "model.safetensors", ns=(0, 0))
    touched = inputs(source)
    assert {key for key in before if before[key] != touched[key]} == {"files"}
    edited = inputs(edit(source, rms_norm_eps=0.5))
    assert {key for key in before if touched[key] != edited[key]} == {"config"}


def test_shares_of_a_text_that_is_written_are_inputs(checkpoint: Make, tmp_path: Path) -> None:
    """The file has one block, whatever its share, so that its hash does not tell."""
    source, short = checkpoint(), tmp_path / "short.txt"
    short.write_text("forty characters, or a few more than that")
    before, after = (inputs(source, given={"self": share, short: 1}, tokens=512) for share in (1, 3))
    assert (before["rows_to_write"], after["rows_to_write"]) == (8, 12)
