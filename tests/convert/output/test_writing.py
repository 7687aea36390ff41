"""Writing an output: what is trusted after an interruption, what any damage leads to, what is published, what stays."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tiny import save_tokenizer, tiny_config, tiny_model
from written import Convert, Make, ok, same_but_for_the_run

import convert.demo
from attention.errors import Failure, Interrupted, KvfoldError, Refusal
from convert.checkpoint.writer import write_shard
from convert.output.destination import Output, partial_path
from convert.output.writing import Work, writing
from eval.inputs.sealed import checksum
from eval.inputs.source import Source

MODEL = Source.parse(str(Path(convert.demo.__file__).with_name("python-5m-mha")))  # of which only files' times are read
INPUTS = {"command": "gqa", "groups": 2}
SHARD = "model.safetensors"
PUBLISHED = ["README.md", "config.json", "conversion.json", SHARD]

DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a flipped bit in the middle": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a list": lambda path: path.write_bytes(b"[1, 2]"),
    "null": lambda path: path.write_bytes(b"null"),
    "other keys": lambda path: path.write_bytes(b'{"bytes": [], "noted": 5, "sha256": null}'),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "a directory": lambda path: (path.unlink(), (path / "x").mkdir(parents=True)),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def opened(out: Path, resume: bool = False, overwrite: bool = False, **inputs: Any) -> Work:
    """The work on an output, without its lock and its end."""
    work = Work("making", Output(out, overwrite=overwrite, resume=resume), [], INPUTS | inputs, {})
    work.begin()
    return work


def shard(work: Work, value: float = 1.0) -> str:
    return write_shard(work.path / SHARD, {"x": torch.full((64,), value)}, {"x": torch.float32})


def make(
    out: Path,
    meanwhile: Callable[[], object] = lambda: None,
    resume: bool = False,
    overwrite: bool = False,
    models: tuple[Source, ...] = (MODEL,),
    optional: int = 0,
    kept: bool = False,
    **inputs: Any,
) -> dict[str, Any] | None:
    """Write an output of one tensor; None if an earlier run has."""
    output = Output(out, overwrite=overwrite, resume=resume)
    with writing("making", output, models, INPUTS | inputs, {"heal": optional}) as work:
        if work.provenance:
            return None
        work.note(SHARD, [{"layer": 0}], shard(work))
        (work.path / "config.json").write_text('{"model_type": "llama"}')
        if kept:
            work.keep()
        meanwhile()
        return work.complete({"kvfold": "", "recipe": {}}, "a card")


def raising(error: BaseException) -> Callable[[], None]:
    def ends() -> None:
        raise error

    return ends


def interrupt() -> None:
    raise KeyboardInterrupt


def everything_in(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*"))


def earlier(path: Path) -> None:
    """What an earlier conversion left."""
    path.mkdir()
    (path / "conversion.json").write_text('{"kvfold": "", "recipe": {}}')


# ---- what is trusted -------------------------------------------------------------------------------------------------


def test_a_noted_shard_is_done_also_for_the_next_run(tmp_path: Path) -> None:
    work = opened(tmp_path / "out")
    assert work.done(SHARD) is None
    work.note(SHARD, [{"layer": 0, "converted": ["x"]}], shard(work))
    again = opened(tmp_path / "out", resume=True)
    for one in (work, again):
        assert one.done(SHARD) == [{"layer": 0, "converted": ["x"]}]
        one.done(SHARD).clear()
        assert one.done(SHARD), "what a caller does to it is the caller's"


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("victim", [f"checkpoint/{SHARD}", f"steps/{SHARD}.json"])
def test_a_shard_or_note_that_changed_is_not_done(victim: str, damage: str, tmp_path: Path) -> None:
    work = opened(tmp_path / "out")
    work.note(SHARD, [{"layer": 0}], shard(work))
    DAMAGE[damage](partial_path(tmp_path / "out") / victim)
    assert opened(tmp_path / "out", resume=True).done(SHARD) is None


def test_a_shard_is_read_for_its_checksum_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = opened(tmp_path / "out")
    work.note(SHARD, [], shard(work))
    read: list[Path] = []
    monkeypatch.setattr("convert.output.writing.checksum", lambda path: read.append(path) or checksum(path))
    assert work.done(SHARD) == []
    assert not read, "it was hashed as it was written"
    resumed = opened(tmp_path / "out", resume=True)
    for _ in range(3):
        assert resumed.done(SHARD) == []
    assert len(read) == 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_remembered_is_recalled_whole_or_not(damage: str, tmp_path: Path) -> None:
    work = opened(tmp_path / "out")
    assert work.recall("decision") is None
    work.remember("decision", {"pairs": [1, 2], "error": 0.25})
    resumed = opened(tmp_path / "out", resume=True)
    assert resumed.recall("decision") == {"pairs": [1, 2], "error": 0.25}
    DAMAGE[damage](work.steps / "decision.json")
    assert resumed.recall("decision") is None


def synced(monkeypatch: pytest.MonkeyPatch, seen: Callable[[str], object]) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen(Path(f"/proc/self/fd/{descriptor}").readlink().name))


def test_a_note_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, names = opened(tmp_path / "out"), list[str]()
    synced(monkeypatch, names.append)
    work.note(SHARD, [], shard(work))
    assert names == [f"{SHARD}.tmp", "checkpoint", f"{SHARD}.json.tmp", "steps"]


def test_everything_is_on_the_disk_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, out = opened(tmp_path / "out"), tmp_path / "out"
    shard(work)
    (work.path / "templates").mkdir()
    (work.path / "templates" / "a.jinja").write_text("")
    before, after = list[str](), list[str]()
    synced(monkeypatch, lambda name: (after if out.exists() else before).append(name))
    work.publish()
    assert {*before} == {SHARD, "templates", "a.jinja", "checkpoint"}
    assert after == ["out.partial", tmp_path.name]


# ---- what is published -----------------------------------------------------------------------------------------------


def test_an_output_appears_whole(tmp_path: Path) -> None:
    provenance = make(tmp_path / "out")
    assert everything_in(tmp_path / "out") == PUBLISHED
    assert everything_in(tmp_path) == ["out", *(f"out/{name}" for name in PUBLISHED)]
    assert provenance == json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["run"].keys() == {"output", "source_files", "started", "seconds", "machine", "inputs"}


def test_what_is_finished_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    make(out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    for overwrite in (False, True):
        assert make(out, resume=True, overwrite=overwrite) is None
        assert caplog.messages.pop() == f"{out} is finished already, there is nothing to do"
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    for other in ({"groups": 1}, {"optional": 5}):
        with pytest.raises(Refusal, match="exists already, and was made by another command"):
            make(out, resume=True, **other)
    (out / SHARD).write_bytes((out / SHARD).read_bytes()[:-1])
    with pytest.raises(Refusal, match="exists already, and is not whole"):
        make(out, resume=True)
    assert make(out, resume=True, overwrite=True)


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_output_whose_provenance_cannot_be_read_is_left_alone(damage: str, tmp_path: Path) -> None:
    make(tmp_path / "out")
    DAMAGE[damage](tmp_path / "out" / "conversion.json")
    if damage != "a flipped bit in the middle":  # it may be in a part that says nothing of the inputs
        with pytest.raises(Refusal, match=r"OUTPUT .*out "):
            make(tmp_path / "out", resume=True)
    assert (tmp_path / "out" / SHARD).exists()


def test_an_optional_input_may_be_left_out_of_a_resumed_run(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make(tmp_path / "out", interrupt, optional=5)
    assert make(tmp_path / "out", resume=True)


def thesis(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years")


def link(path: Path) -> None:
    thesis(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize("appears", [Path.touch, thesis, link, earlier], ids=lambda made: made.__name__)
def test_what_appears_at_output_is_not_replaced(appears: Callable[[Path], object], overwrite: bool, tmp_path: Path) -> None:
    out, there = tmp_path / "out", list[str]()

    def meanwhile() -> None:
        appears(out)
        there.extend(name for name in everything_in(tmp_path) if not name.startswith("out."))

    with pytest.raises(Failure, match="out is in the way: it has appeared or changed since this run began") as caught:
        make(out, meanwhile, overwrite=overwrite)
    assert "--resume" in str(caught.value.hint)
    assert [name for name in everything_in(tmp_path) if not name.startswith("out.")] == there
    out.rename(tmp_path / "away")
    make(out, resume=True)
    assert everything_in(out) == PUBLISHED
    assert not partial_path(out).exists()


def test_an_empty_directory_at_output_holds_nothing_to_lose(tmp_path: Path) -> None:
    make(tmp_path / "out", (tmp_path / "out").mkdir)
    assert everything_in(tmp_path / "out") == PUBLISHED


@pytest.mark.parametrize("late", ["added", "swapped", None])
def test_overwriting_replaces_what_was_there_when_the_run_began(late: str | None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    earlier(out)

    def meanwhile() -> None:
        if late == "swapped":
            shutil.rmtree(out)
            link(out)
        elif late:
            (out / "notes.txt").write_text("mine")

    if late:
        with pytest.raises(Failure, match="has appeared or changed"):
            make(out, meanwhile, overwrite=True)
        assert (out / "notes.txt" if late == "added" else tmp_path / "elsewhere" / "thesis.txt").exists()
    if late != "swapped":
        make(out, resume=late is not None, overwrite=True)
        assert everything_in(tmp_path) == ["out", *(f"out/{name}" for name in PUBLISHED)]


def killed_between_the_renames(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def killed(self: Path, target: Path) -> None:
        if self.name == "checkpoint":
            raise KeyboardInterrupt
        rename(self, target)

    earlier(out)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Interrupted):
            make(out, overwrite=True)
    assert not out.exists()


def test_a_kill_between_the_two_renames_loses_neither_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    killed_between_the_renames(out, monkeypatch)
    make(out, resume=True)
    assert everything_in(tmp_path) == ["out", *(f"out/{name}" for name in PUBLISHED)]
    shutil.rmtree(out)
    killed_between_the_renames(out, monkeypatch)
    for again in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(Failure, match="bad weights"):
            make(out, raising(Failure("bad weights")), **again)
        assert everything_in(tmp_path) == ["out", "out/conversion.json"], "the old one comes back"


def test_a_kill_behind_the_publication_leaves_a_directory_that_resume_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Work, "discard", lambda self: interrupt() if out.exists() else None)
        with pytest.raises(Interrupted):
            make(out)
    with pytest.raises(Refusal, match="exists already"):
        make(out)
    assert make(out, resume=True) is None
    assert everything_in(tmp_path) == ["out", *(f"out/{name}" for name in PUBLISHED)]


@pytest.mark.parametrize("resume", [False, True], ids=["", "resume"])
def test_weights_that_change_meanwhile_are_refused(resume: bool, checkpoint: Make, tmp_path: Path) -> None:
    source, out = Source.parse(str(checkpoint())), tmp_path / "out"
    if resume:
        with pytest.raises(Interrupted):
            make(out, interrupt, models=(source,))
    with pytest.raises(Failure, match=r"source/model\.safetensors has changed since this run began"):
        make(out, lambda: os.utime(source.files / SHARD, ns=(0, 0)), resume=resume, models=(source,))
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
    assert make(out, models=(source,))


# ---- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False], ids=["kept", ""])
@pytest.mark.parametrize(
    ("ends", "error", "says", "stays"),
    [
        (KeyboardInterrupt(), Interrupted, "interrupted", True),
        (OSError(errno.ENOSPC, "full"), Failure, "the making to .*out stopped: .*full", True),
        (RuntimeError("a bug"), RuntimeError, "a bug", True),
        (Failure("bad weights"), Failure, "bad weights", False),
        (Refusal("no"), Refusal, "no", False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_work_stays_if_it_can_be_resumed(
    ends: BaseException, error: type[Exception], says: str, stays: bool, kept: bool, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        make(tmp_path / "out", raising(ends), kept=kept)
    assert not (tmp_path / "out").exists()
    assert partial_path(tmp_path / "out").exists() == (stays or kept)
    assert make(tmp_path / "out", resume=True)


def test_a_failure_that_speaks_of_memory_keeps_its_own_hint(tmp_path: Path) -> None:
    work, full = opened(tmp_path / "out"), RuntimeError("CUDA out of memory")
    with pytest.raises(Failure, match="no memory left on cpu"), work.kept_without_memory("cpu", "free some"):
        raise full
    work.kept = False
    said = Failure("CUDA out of memory in layer 3", hint="its own")
    with pytest.raises(Failure, match="layer 3") as caught, work.kept_without_memory("cpu", "free some"):
        raise said
    assert (caught.value, work.kept) == (said, False)


def test_another_work_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        make(out, interrupt)
    with pytest.raises(Refusal, match="holds an unfinished conversion"):
        make(out)
    with pytest.raises(Refusal, match="groups: 2 then, 1 now"):
        make(out, resume=True, groups=1)
    assert opened(out, resume=True).done(SHARD)
    assert make(out, resume=True, overwrite=True, groups=1)


def test_too_little_space_removes_what_is_of_no_use(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for steps, stays in ((False, False), (True, True)):
        with pytest.raises(Failure, match="no space") as caught, writing("making", Output(out), [], INPUTS) as work:  # noqa: PT012
            if steps:
                work.note(SHARD, [], shard(work))
            work.require_space(2**62)
        assert partial_path(out).exists() == ("--resume" in str(caught.value.hint)) == stays


# ---- damage, end to end ----------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    from convert.command.cli import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@dataclass(frozen=True)
class Stopped:
    """A conversion that was interrupted behind its second shard, and the same one whole."""

    source: Path
    command: list[object]
    partial: Path
    whole: Path

    def again(self, directory: Path) -> Path:
        """A copy of what it left, for an OUTPUT in `directory`."""
        shutil.copytree(self.partial, directory / "out.partial")
        return directory / "out"

    def resume(self, out: Path, *flags: str) -> Result:
        return run(self.command[0], self.source, out, *self.command[1:], "--resume", *flags)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    from convert.execute import weights as module

    directory = tmp_path_factory.mktemp("latent")
    source, out, write, count = directory / "source", directory / "stopped", module.write_shard, [0]
    tiny_model(tiny_config("llama", num_hidden_layers=2)).save_pretrained(source)
    save_tokenizer(source)
    (directory / "text.txt").write_text("a line of text, and another\n" * 60)
    text = ["--text", directory / "text.txt", "--calibration-context", 32, "--calibration-tokens", 128]
    command = ["mla", "--kv-budget", "50%", *text, "--max-shard-size", "20KB", "--heal", 0, "-q"]

    def interrupted(*given: Any) -> str:
        count[0] += 1
        return interrupt() or write(*given) if count[0] == 3 else write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_shard", interrupted)
        left = run(command[0], source, out, *command[1:])
    assert left.exit_code == 130, left.output
    ok(run(command[0], source, directory / "whole", *command[1:]))
    return Stopped(source, list(command), partial_path(out), directory / "whole")


@pytest.mark.parametrize("damage", ["a flipped bit in the middle", "a link to nothing", "a directory"])
@pytest.mark.parametrize(
    "victim", ["inputs.json", "steps/decision.jso*", "steps/source-*", "steps/layer-*", "steps/model*", "checkpoint/*.s*"]
)
def test_a_damaged_file_is_made_again(victim: str, damage: str, stopped: Stopped, tmp_path: Path) -> None:
    out = stopped.again(tmp_path)
    DAMAGE[damage](named := min(partial_path(out).glob(victim)))
    result = stopped.resume(out)
    if result.exit_code:
        first, *hints = [line for line in result.stderr.splitlines() if not line.startswith("convert: ")]
        assert first.startswith("error: ")
        assert [hint[:6] for hint in hints] == ["hint: "]
        # Another plan, as far as can be seen; or something that no run has put there. Neither is thrown away unasked.
        if victim == "inputs.json" and not named.is_dir():
            result = stopped.resume(out, "--overwrite")
        else:
            named.unlink() if named.is_symlink() else shutil.rmtree(named)
            result = stopped.resume(out)
    ok(result)
    same_but_for_the_run(out, stopped.whole)
    assert not partial_path(out).exists()


@pytest.mark.parametrize("kind", ["a file", "a link", "nothing"])
@pytest.mark.parametrize("part", ["steps", "training", "checkpoint"])
def test_a_damaged_directory_is_made_again(part: str, kind: str, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    thesis(elsewhere)
    with pytest.raises(Interrupted):
        make(out, interrupt)
    shutil.rmtree(partial_path(out) / part)
    if kind == "a file":
        (partial_path(out) / part).write_text("")
    elif kind == "a link":
        (partial_path(out) / part).symlink_to(elsewhere)
    assert make(out, resume=True)
    assert everything_in(elsewhere) == ["thesis.txt"]


@pytest.mark.parametrize("error", [Refusal("late"), Failure("late")], ids=["Refusal", "Failure"])
def test_a_late_refusal_leaves_nothing_behind(
    error: KvfoldError, checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.converting.convert_layers", lambda *_: raising(error)())
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--method", "mean")
    assert result.exit_code == error.exit_code
    assert "error: late" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_an_evaluation_that_fails_does_not_lose_the_conversion(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, command = tmp_path / "text.txt", ["gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--method", "mean"]
    text.write_text("a line of text, and another\n" * 40)
    with monkeypatch.context() as patch:
        patch.setattr("convert.output.evaluation.report_of", lambda *_: raising(Refusal("no such device"))())
        result = convert(*command, "--evaluate", text)
    assert result.exit_code == 1
    assert "the conversion is done, its evaluation failed: no such device" in result.stderr
    written = next((tmp_path / "out.partial").rglob(SHARD)).stat().st_mtime_ns
    ok(convert(*command, "--resume"))
    assert (tmp_path / "out" / SHARD).stat().st_mtime_ns == written


def test_a_finished_budget_reports_the_split_that_was_chosen(stopped: Stopped, tmp_path: Path) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved.txt"
    shutil.copytree(stopped.whole, out)
    said = ok(stopped.resume(out, "--json")).stdout
    assert json.loads(said)["kv_lora_rank"] == json.loads((out / "config.json").read_text())["kv_lora_rank"]
    moved.write_text((stopped.source.parent / "text.txt").read_text())
    given = [moved if isinstance(one, Path) else one for one in stopped.command[1:]]
    ok(run("mla", stopped.source, out, *given, "--resume"))  # where the text lies does not matter
    moved.write_text("some other text, as long as it has to be\n" * 60)
    assert "made by another command" in run("mla", stopped.source, out, *given, "--resume").stderr
