"""The life of an output, by a task that only notes what it is asked for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import Make

from attention.errors import Failure, Interrupted
from convert.output.destination import Output, partial_path
from convert.output.life import Made, Task, carry_out
from convert.output.workdir import WorkDirectory
from eval.inputs.source import Source
from eval.inputs.text import Tokens
from eval.terminal.progress import silent


class Noting(Task):
    """A task that writes one file, and fails there if it is told to."""

    noun = "making"
    labels = ()

    def __init__(
        self, ends: BaseException | None = None, finished: bool = False, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        self.asked: list[str] = []
        self._ends, self._finished, self._meanwhile = ends, finished, meanwhile

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

    def make(self, work: WorkDirectory) -> Made:
        self.asked.append("make")
        (work.path / "weights").write_text("1")
        self._meanwhile()
        if self._ends is not None:
            raise self._ends
        return Made({"recipe": {}})

    def card(self, provenance: dict[str, Any]) -> str:
        assert "run" not in provenance
        return f"card of {sorted(provenance)}"


def live(
    task: Task,
    path: Path,
    resume: bool = False,
    published: Callable[[], None] = lambda: None,
    overwrite: bool = False,
    models: tuple[Source, ...] = (),
) -> dict[str, Any]:
    def begin(evaluated: Tokens | None) -> Task:
        assert evaluated is None
        return task

    return carry_out(Output(path, overwrite=overwrite, resume=resume), models, begin, None, silent, published)


def test_a_task_is_asked_in_order_and_its_output_appears_whole(tmp_path: Path) -> None:
    task, out, there = Noting(), tmp_path / "out", list[bool]()
    provenance = live(task, out, published=lambda: there.append(out.is_dir() and partial_path(out).is_dir()))
    assert task.asked == ["check", "make"]
    assert there == [True], "told while --resume still recognises the work"
    assert {path.name for path in out.iterdir()} == {"weights", "conversion.json", "README.md"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert provenance == json.loads((out / "conversion.json").read_text())
    assert provenance["run"]["source_files"] == {"weights": [1, 2]}
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


# ---- what appears at OUTPUT meanwhile --------------------------------------------------------------------------------


def thesis(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years")


def link(path: Path) -> None:
    thesis(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def result(path: Path) -> None:
    """What an earlier conversion left."""
    path.mkdir()
    (path / "conversion.json").write_text('{"kvfold": "", "recipe": {}}')


def everything_in(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*"))


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize("appears", [Path.touch, thesis, link, result], ids=lambda made: made.__name__)
def test_what_appears_at_output_is_not_replaced(appears: Callable[[Path], object], overwrite: bool, tmp_path: Path) -> None:
    out, there = tmp_path / "out", list[str]()

    def meanwhile() -> None:
        appears(out)
        there.extend(name for name in everything_in(tmp_path) if not name.startswith("out."))

    with pytest.raises(Failure, match="out is in the way: it has appeared or changed since this run began") as caught:
        live(Noting(meanwhile=meanwhile), out, overwrite=overwrite)
    assert "--resume" in str(caught.value.hint)
    assert [name for name in everything_in(tmp_path) if not name.startswith("out.")] == there
    out.rename(tmp_path / "away")
    live(Noting(), out, resume=True)
    assert everything_in(out) == ["README.md", "conversion.json", "weights"]
    assert not partial_path(out).exists()


def test_an_empty_directory_at_output_holds_nothing_to_lose(tmp_path: Path) -> None:
    live(Noting(meanwhile=(tmp_path / "out").mkdir), tmp_path / "out")
    assert everything_in(tmp_path / "out") == ["README.md", "conversion.json", "weights"]


@pytest.mark.parametrize("late", ["added", "swapped", None])
def test_overwriting_replaces_what_was_there_when_the_run_began(late: str | None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result(out)

    def meanwhile() -> None:
        if late == "swapped":
            shutil.rmtree(out)
            link(out)
        elif late:
            (out / "notes.txt").write_text("mine")

    if late is None:
        live(Noting(), out, overwrite=True)
        assert everything_in(tmp_path) == ["out", "out/README.md", "out/conversion.json", "out/weights"]
        return
    with pytest.raises(Failure, match="has appeared or changed"):
        live(Noting(meanwhile=meanwhile), out, overwrite=True)
    mine = out / "notes.txt" if late == "added" else tmp_path / "elsewhere" / "thesis.txt"
    assert mine.exists()
    if late == "added":
        live(Noting(), out, resume=True, overwrite=True)
        assert everything_in(tmp_path) == ["out", "out/README.md", "out/conversion.json", "out/weights"]


def test_what_stepped_aside_is_replaced_by_a_resumed_run_and_not_lost_by_a_failed_one(tmp_path: Path) -> None:
    """A run with --overwrite was killed between its two renames."""
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        live(Noting(KeyboardInterrupt()), out)
    result(partial_path(out) / "replaced")
    with pytest.raises(Failure, match="bad weights"):
        live(Noting(Failure("bad weights")), out, resume=True)
    assert everything_in(tmp_path) == ["out", "out/conversion.json"]
    shutil.rmtree(out)
    with pytest.raises(Interrupted):
        live(Noting(KeyboardInterrupt()), out)
    result(partial_path(out) / "replaced")
    live(Noting(), out, resume=True)
    assert everything_in(tmp_path) == ["out", "out/README.md", "out/conversion.json", "out/weights"]


# ---- weights that change meanwhile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True], ids=["", "resume"])
def test_weights_that_change_meanwhile_are_refused(resume: bool, checkpoint: Make, tmp_path: Path) -> None:
    source, out = Source.parse(str(checkpoint())), tmp_path / "out"
    weights = source.files / "model.safetensors"
    if resume:
        with pytest.raises(Interrupted):
            live(Noting(KeyboardInterrupt()), out, models=(source,))
    task = Noting(meanwhile=lambda: os.utime(weights, ns=(0, 0)))
    with pytest.raises(Failure, match=r"source/model\.safetensors has changed since this run began"):
        live(task, out, resume, models=(source,))
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    live(Noting(), out, models=(source,))
    assert out.is_dir()
