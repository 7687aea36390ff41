"""How many tokens `--time` allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention.errors import Refusal
from convert import Healing, heal
from convert.healing import timing
from convert.healing.texts import TrainingTexts
from convert.output.destination import Output

PACES = 0.01, 0.002  # seconds of a token in a step and in a measurement


def test_a_time_is_as_many_tokens_as_it_takes(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_paces", lambda plan, module: PACES)
    given = {"text": text, "dry_run": True, "context": 32, "batch_tokens": 128, "device": "cpu", "lr": 1e-3}
    for time, seconds in (("1min", 60), (30, 30), ("0.5h", 1800)):
        plan = heal(converted, tmp_path / "out", time=time, **given).plan
        assert timing._seconds(plan, TrainingTexts.read(plan), *PACES) == pytest.approx(seconds, rel=0.1)
    for changes, says in (
        ({"time": 1}, r"a healing of 128 tokens takes .* seconds here, longer than --time allows"),
        ({"time": "1h", "tokens": 100}, "contradict each other"),
        ({"time": "1x"}, r"'1x' is not a time"),
    ):
        with pytest.raises(Refusal, match=says):
            heal(converted, tmp_path / "out", **(given | changes))
    monkeypatch.setattr(timing, "launched_count", lambda: 2)
    with pytest.raises(Refusal, match="2 processes would each time steps"):
        heal(converted, tmp_path / "two", time=30, **given)


def test_what_was_begun_keeps_its_tokens(healed: Healing, tmp_path: Path) -> None:
    """However fast its steps are now; one that is finished and replaced is timed anew."""
    plan = replace(healed.plan, asked=10**9, output=replace(healed.plan.output, resume=True))
    resumed = timing.within(plan, 1.0, lambda *_: None)
    assert (resumed.tokens, resumed.batch, resumed.steps) == (640, 4, 10)
    assert timing._begun(replace(plan.output, overwrite=True)) is None
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "inputs.json").write_text('{"tokens": 1280, "batch_tokens": 64}')
    assert timing._begun(Output(tmp_path / "out", resume=True, overwrite=True)) == (1280, 64)


def test_steps_are_timed_and_leave_nothing_behind(converted: Path, text: Path, tmp_path: Path) -> None:
    told: list[Any] = []
    sizes = {"context": 32, "batch_tokens": 128, "device": "cpu", "lr": 1e-3, "train": "all"}
    given = {"time": 20, "dry_run": True, "progress": lambda *progress: told.append(progress)}
    assert heal(converted, tmp_path / "out", text=text, **given, **sizes).plan.tokens > 1000
    assert told[-1] == ("time steps", 9, 9, "step")
    assert not list(tmp_path.glob("out*"))
