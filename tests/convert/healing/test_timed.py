"""How many tokens `--time` allows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attention.errors import Refusal
from convert import heal
from convert.healing import timed
from convert.healing.texts import TrainingTexts

SIZES: dict[str, Any] = {"context": 32, "batch_tokens": 128, "device": "cpu", "lr": 1e-3}
PACES = 0.01, 0.002  # seconds of a token in a step and in a measurement


def test_a_time_is_as_many_tokens_as_it_takes(
    converted: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has known paces, and what was begun keeps its tokens on one with others."""
    monkeypatch.setattr(timed, "_paces", lambda plan, module: PACES)
    given = SIZES | {"text": text}
    for time, seconds in (("1min", 60), (30, 30), ("0.5h", 1800)):
        plan = heal(converted, tmp_path / "out", time=time, dry_run=True, **given).plan
        assert timed._seconds(plan, TrainingTexts.read(plan), *PACES) == pytest.approx(seconds, rel=0.1)
    with pytest.raises(Refusal, match=r"a healing of 128 tokens takes 5\.7 seconds here, longer than --time allows"):
        heal(converted, tmp_path / "out", time=2, **given)
    with pytest.raises(Refusal, match="contradict each other"):
        heal(converted, tmp_path / "out", time="1h", tokens=100, **given)
    with pytest.raises(Refusal, match=r"'1x' is not a time"):
        heal(converted, tmp_path / "out", time="1x", **given)
    done = heal(converted, tmp_path / "out", time=30, **given)
    assert done.plan.tokens == done.provenance["recipe"]["heal"]["tokens"]
    monkeypatch.setattr(timed, "_paces", lambda plan, module: (0.001, 0.001))
    assert heal(converted, tmp_path / "out", time=30, resume=True, **given).plan.tokens == done.plan.tokens
    again = replace(done.plan.output, resume=True, overwrite=True)
    assert timed.tokens_of_begun(again) is None, "a finished one is replaced"
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "inputs.json").write_text('{"tokens": 640}')
    assert timed.tokens_of_begun(again) == 640
    monkeypatch.setattr(timed, "launched_count", lambda: 2)
    with pytest.raises(Refusal, match="2 processes would each time steps"):
        heal(converted, tmp_path / "two", time=30, **given)


@pytest.mark.parametrize("more", [{}, {"train": "all"}])
def test_steps_are_timed_and_leave_nothing_behind(converted: Path, text: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    told = []
    given = {"time": 20, "dry_run": True, "progress": lambda *progress: told.append(progress)}
    plan = heal(converted, tmp_path / "out", text=text, **given, **SIZES, **more).plan
    assert plan.tokens > 1000
    assert told[-1] == ("time steps", 9, 9, "step")
    assert not list(tmp_path.glob("out*"))
