"""The life of an output, by a task that only notes what it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attention.errors import Failure, Interrupted
from convert.output.destination import Output, partial_path
from convert.output.life import Made, Task, carry_out
from convert.output.workdir import WorkDirectory
from eval.inputs.text import Tokens
from eval.terminal.progress import silent


class Noting(Task):
    """A task that writes one file, and fails there if it is told to."""

    noun = "making"
    labels = ()

    def __init__(self, ends: BaseException | None = None, finished: bool = False) -> None:
        self.asked: list[str] = []
        self._ends, self._finished = ends, finished

    def is_finished(self) -> bool:
        self.asked.append("finished")
        return self._finished

    def check(self) -> None:
        self.asked.append("check")

    def idle(self) -> None:
        self.asked.append("idle")

    def inputs(self) -> dict[str, Any]:
        return {"a": 1}

    def source_files(self) -> dict[str, Any]:
        return {"weights": [1, 2]}

    def foretell(self, evaluated: int) -> float | None:
        self.asked.append(f"foretell {evaluated}")
        return 12.34

    def make(self, work: WorkDirectory) -> Made:
        self.asked.append("make")
        (work.path / "weights").write_text("1")
        if self._ends is not None:
            raise self._ends
        return Made({"recipe": {}})

    def card(self, provenance: dict[str, Any]) -> str:
        assert "run" not in provenance
        return f"card of {sorted(provenance)}"


def live(task: Task, path: Path, resume: bool = False, published: Callable[[], None] = lambda: None) -> dict[str, Any]:
    def begin(evaluated: Tokens | None) -> Task:
        assert evaluated is None
        return task

    return carry_out(Output(path, resume=resume), (), begin, None, silent, published)


def test_a_task_is_asked_in_order_and_its_output_appears_whole(tmp_path: Path) -> None:
    task, out, there = Noting(), tmp_path / "out", list[bool]()
    provenance = live(task, out, published=lambda: there.append(out.is_dir() and partial_path(out).is_dir()))
    assert task.asked == ["check", "foretell 0", "make"]
    assert there == [True], "told while --resume still recognises the work"
    assert {path.name for path in out.iterdir()} == {"weights", "conversion.json", "README.md"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert provenance == json.loads((out / "conversion.json").read_text())
    assert (provenance["run"]["source_files"], provenance["run"]["expected_seconds"]) == ({"weights": [1, 2]}, 12.3)
    assert (out / "README.md").read_text() == "card of ['recipe']"


def test_what_is_finished_is_left_alone(tmp_path: Path) -> None:
    live(Noting(), tmp_path / "out")
    (tmp_path / "out" / "conversion.json").write_text('{"kvfold": "", "recipe": {}}')
    task = Noting(finished=True)
    assert live(task, tmp_path / "out", resume=True) == {"kvfold": "", "recipe": {}}
    assert task.asked == ["finished", "idle"]


def test_a_run_that_was_stopped_behind_its_publication_only_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        live(Noting(), tmp_path / "out", published=stop)
    (tmp_path / "out" / "conversion.json").write_text('{"kvfold": "", "recipe": {}}')
    task = Noting()
    assert live(task, tmp_path / "out", resume=True) == {"kvfold": "", "recipe": {}}
    assert task.asked == ["finished", "check", "idle"]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize(
    ("ends", "error", "says", "kept"),
    [
        (KeyboardInterrupt(), Interrupted, "interrupted", True),
        (OSError("no space"), Failure, "the making to .*out stopped: no space", True),
        (Failure("bad weights"), Failure, "bad weights", False),
    ],
)
def test_an_error_is_explained_and_the_work_stays_if_it_can_be_resumed(
    ends: BaseException, error: type[Exception], says: str, kept: bool, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        live(Noting(ends), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert partial_path(tmp_path / "out").exists() == kept
    task = Noting()
    live(task, tmp_path / "out", resume=True)
    assert task.asked[-1] == "make"
