"""The work of healings: what adds to it, what a dry run shows of it, and that a run says it once."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention.errors import Refusal
from convert import PlannedHealing, heal
from convert.healing import timed
from convert.healing.forecast import work_of
from eval.inputs.source import Source
from eval.machine import forecast
from eval.machine.forecast import Decoder, Machine

SIZES: dict[str, Any] = {"tokens": 2048, "context": 32, "batch_tokens": 128, "device": "cpu", "lr": 1e-3}


def flops(converted: Path, output: Path, text: Path, **changes: Any) -> float:
    plan = heal(converted, output, text=text, dry_run=True, **(SIZES | changes)).plan
    return work_of(plan, 6000, 128).flops


def test_training_everything_is_three_forward_passes_beside_the_teachers(converted: Path, text: Path, tmp_path: Path) -> None:
    """Points of the curve come on top: ten, and one before and after, of 128 tokens each."""
    source = Source.parse(str(converted))
    student = Decoder.of(source.config)
    teacher = Decoder.of(Source.parse(str(tmp_path / "source")).config)
    mine, theirs = (one.forward(2048, 32).flops for one in (student, teacher))
    measured = 12 * 128 / 2048
    found = flops(converted, tmp_path / "out", text, train="all")
    assert found == pytest.approx((3 + measured) * mine + (1 + measured) * theirs, rel=0.1)  # the head's weights are one less


def test_an_evaluation_counts_each_model_also_in_the_format_of_the_cache(converted: Path, text: Path, tmp_path: Path) -> None:
    plans = (
        heal(converted, tmp_path / "out", text=text, dry_run=True, **SIZES, **more).plan
        for more in ({}, {"cache_dtype": "int8"})
    )
    plain, rounded = (work_of(plan, 6000, 128, 1000).flops - work_of(plan, 6000, 128).flops for plan in plans)
    assert rounded == 2 * plain > 0


def test_what_a_healing_does_adds_to_its_work(converted: Path, text: Path, tmp_path: Path) -> None:
    def given(**changes: Any) -> float:
        return flops(converted, tmp_path / "out", text, **changes)

    plain = given()
    assert plain < given(train="all")
    assert plain < given(checkpointing=True)
    longer = 150 * SIZES["batch_tokens"]  # long enough to try rates
    assert given(tokens=longer) < given(tokens=longer, lr="auto")
    assert plain == given(lr="auto")
    assert plain < given(eval_every=128)
    assert given(tokens=4096) == pytest.approx(2 * plain, rel=0.3)


def test_a_dry_run_has_the_figure_and_a_run_says_it_once(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(name: str, width: int, dtype: str) -> Machine:
        return Machine(name, 1e5, 1e4, 1e5, 1e3)

    monkeypatch.setattr(forecast, "_measured", slow)
    monkeypatch.setattr(forecast, "_SLOW", slow("", 0, ""))
    planned = heal(converted, tmp_path / "out", text=text, dry_run=True, **SIZES)
    assert isinstance(planned, PlannedHealing)
    assert json.loads(json.dumps(planned.as_dict()))["expected_seconds"] == planned.expected_seconds
    assert "\nwould take about " in str(planned)
    with caplog.at_level(logging.INFO, "kvfold"):
        done = heal(converted, tmp_path / "out", text=text, evaluate=text, **SIZES)
    said = [record.getMessage() for record in caplog.records]
    assert (
        len([line for line in said if line.startswith("takes about ") and line.endswith(" on cpu") and "GB" not in line]) == 1
    )
    assert done.provenance["run"]["expected_seconds"] > planned.expected_seconds


def test_a_time_is_as_many_tokens_as_it_takes(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast is replaced by one of known speed, and what was begun keeps its tokens on a machine of another speed."""
    speed = 100.0
    monkeypatch.setattr(timed, "expected_duration", lambda plan, *_: 5 + min(plan.tokens, 20_000) / 1e3 + plan.tokens / speed)
    given = {name: value for name, value in SIZES.items() if name != "tokens"} | {"text": text}
    for time, seconds in (("1min", 60), (30, 30), ("0.5h", 1800)):
        plan = heal(converted, tmp_path / "out", time=time, dry_run=True, **given).plan
        assert 0.96 * seconds < timed.expected_duration(plan, timed.TrainingTexts.read(plan), 0) <= seconds
    with pytest.raises(Refusal, match="a healing of 128 tokens takes 6 seconds here, longer than --time allows"):
        heal(converted, tmp_path / "out", time=4, **given)
    with pytest.raises(Refusal, match="contradict each other"):
        heal(converted, tmp_path / "out", time="1h", tokens=100, **given)
    with pytest.raises(Refusal, match=r"'1x' is not a time"):
        heal(converted, tmp_path / "out", time="1x", **given)
    done = heal(converted, tmp_path / "out", time=30, **given)
    assert done.plan.tokens == done.provenance["recipe"]["heal"]["tokens"]
    speed = 1000.0
    assert heal(converted, tmp_path / "out", time=30, resume=True, **given).plan.tokens == done.plan.tokens
    again = replace(done.plan.output, resume=True, overwrite=True)
    assert timed.tokens_of_begun(again) is None, "a finished one is replaced"
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "inputs.json").write_text('{"tokens": 640}')
    assert timed.tokens_of_begun(again) == 640
    monkeypatch.setattr(timed, "launched_count", lambda: 2)
    with pytest.raises(Refusal, match="2 processes would each have a forecast"):
        heal(converted, tmp_path / "two", time=30, **given)
