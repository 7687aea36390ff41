"""Writing an output: what is trusted after an interruption, what any damage leads to, what is published, what stays."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from written import Convert, Make, ok, raising

import convert.demo
from attention.errors import Failure, Interrupted, Refusal
from convert.checkpoint.writer import write_shard
from convert.output.destination import Output, check_output, partial_path
from convert.output.writing import Work, writing
from eval.inputs.source import Source

MODEL = Source.parse(str(Path(convert.demo.__file__).with_name("python-5m-mha")))  # of which only files' times are read
INPUTS = {"command": "gqa", "groups": 2}
SHARD = "model.safetensors"
PUBLISHED = ["README.md", "config.json", "conversion.json", SHARD]

DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a flipped bit in the middle": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "other keys": lambda path: path.write_bytes(b'{"bytes": [], "noted": 5, "sha256": null}'),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
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
        work.remember(SHARD, [{"layer": 0}], {SHARD: shard(work)})
        (work.path / "config.json").write_text('{"model_type": "llama"}')
        if kept:
            work.kept = True
        meanwhile()
        return work.complete({"kvfold": "", "recipe": {}}, "a card")


interrupt = raising(KeyboardInterrupt())


def everything_in(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*"))


def earlier(path: Path) -> None:
    """What an earlier conversion left."""
    path.mkdir()
    (path / "conversion.json").write_text('{"kvfold": "", "recipe": {}}')


def test_a_noted_shard_is_done_also_for_the_next_run(tmp_path: Path) -> None:
    work = opened(tmp_path / "out")
    assert work.recall(SHARD) is None
    work.remember(SHARD, [{"layer": 0, "converted": ["x"]}], {SHARD: shard(work)})
    again = opened(tmp_path / "out", resume=True)
    for one in (work, again):
        assert one.recall(SHARD) == [{"layer": 0, "converted": ["x"]}]
        one.recall(SHARD).clear()
        assert one.recall(SHARD), "what a caller does to it is the caller's"


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("victim", [f"checkpoint/{SHARD}", f"steps/{SHARD}.json"])
def test_a_shard_or_note_that_changed_is_not_done(victim: str, damage: str, tmp_path: Path) -> None:
    work = opened(tmp_path / "out")
    work.remember(SHARD, [{"layer": 0}], {SHARD: shard(work)})
    DAMAGE[damage](partial_path(tmp_path / "out") / victim)
    assert opened(tmp_path / "out", resume=True).recall(SHARD) is None


def synced(monkeypatch: pytest.MonkeyPatch, seen: Callable[[str], object]) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen(Path(f"/proc/self/fd/{descriptor}").readlink().name))


def test_a_note_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, names = opened(tmp_path / "out"), list[str]()
    synced(monkeypatch, names.append)
    work.remember(SHARD, [], {SHARD: shard(work)})
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


def test_an_output_appears_whole(tmp_path: Path) -> None:
    """An optional input may be left out of a resumed run, and an empty directory at OUTPUT holds nothing to lose."""
    with pytest.raises(Interrupted):
        make(tmp_path / "out", interrupt, optional=5)
    provenance = make(tmp_path / "out", (tmp_path / "out").mkdir, resume=True)
    assert provenance
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


# Kills an output of one tensor before each of its steps on the disk, and resumes it. Prints how many there were.
KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import torch
from convert.checkpoint.writer import write_shard
from convert.output.destination import Output
from convert.output.writing import writing

out, overwrite, left = Path(sys.argv[1]), sys.argv[2] == "overwrite", 0
REMOVED, STEPS = ("os.remove", "os.rmdir"), ("open", "os.rename", "os.mkdir", "shutil.rmtree")

def step(event, arguments):
    global left
    named = event in STEPS and any(str(one).startswith(str(out)) for one in arguments if isinstance(one, str | Path))
    if named or event in REMOVED:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def make(resume=False):
    with writing("making", Output(out, overwrite=overwrite, resume=resume), [], {"a": 1}) as work:
        if work.provenance:
            return
        if not work.recall("model.safetensors"):
            tensors = {"x": torch.ones(64)}
            checksum = write_shard(work.path / "model.safetensors", tensors, {"x": torch.float32})
            work.remember("model.safetensors", [{}], {"model.safetensors": checksum})
        (work.path / "config.json").write_text('{"model_type": "llama"}')
        work.complete({"kvfold": "", "recipe": {"mqa": {}}}, "a card")

def content():
    found = {path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else {}
    if found.keys() > {"conversion.json"}:
        found["conversion.json"] = json.dumps(json.loads(found["conversion.json"])["recipe"])
    return found

os.fsync = lambda descriptor: None
sys.addaudithook(step)
OLD = {"conversion.json": b'{"kvfold": "", "recipe": {}}'}
whole, moment, code = None, 0, -signal.SIGKILL
while code == -signal.SIGKILL:
    if overwrite:
        out.mkdir(parents=True)
        (out / "conversion.json").write_bytes(OLD["conversion.json"])
    child = os.fork()
    if not child:
        left = moment
        make()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    there = content()
    if whole is None:  # nothing was killed: moment 0
        whole, code = there, -signal.SIGKILL
    assert there in ({}, OLD, whole), (moment, there)
    assert there or not overwrite or (out.with_name("out.partial") / "replaced" / "conversion.json").exists(), moment
    make(resume=True)
    assert content() == whole, moment
    assert os.listdir(out.parent) == ["out"], (moment, os.listdir(out.parent))
    shutil.rmtree(out.parent)
    out.parent.mkdir()
    moment += 1
print(moment - 2)
"""


@pytest.mark.parametrize("overwrite", ["", "overwrite"])
def test_a_kill_at_any_moment_loses_nothing_and_is_resumed(overwrite: str, tmp_path: Path) -> None:
    """What is at OUTPUT is the whole result, or what was there before; its bytes are those of a run that nothing killed."""
    (tmp_path / "in").mkdir()
    done = run_forked(KILLED, tmp_path / "in" / "out", overwrite)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_a_failure_behind_a_kill_brings_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = tmp_path / "out", Path.rename

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
    for again in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(Failure, match="bad weights"):
            make(out, raising(Failure("bad weights")), **again)
        assert everything_in(tmp_path) == ["out", "out/conversion.json"]


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
    assert opened(out, resume=True).recall(SHARD)
    assert make(out, resume=True, overwrite=True, groups=1)


def test_too_little_space_removes_what_is_of_no_use(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for steps, stays in ((False, False), (True, True)):
        with pytest.raises(Failure, match="no space") as caught, writing("making", Output(out), [], INPUTS) as work:  # noqa: PT012
            if steps:
                work.remember(SHARD, [], {SHARD: shard(work)})
            work.require_space(2**62)
        assert partial_path(out).exists() == ("--resume" in str(caught.value.hint)) == stays


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


def checked(out: Path, source: Path | None = None) -> list[str]:
    """What is said of an OUTPUT without a flag, with --resume and with --overwrite."""
    said = []
    for given in (Output(out), Output(out, resume=True), Output(out, overwrite=True)):
        try:
            check_output(given, source)
        except Refusal as refusal:
            said.append(str(refusal))
    return said


def test_what_is_not_ours_is_never_deleted(tmp_path: Path) -> None:
    for name in ("out.partial", "out.old", "other.partial/notes", "home"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "thesis.txt").write_text("years")
    for name in ("out", "other"):
        assert checked(tmp_path / name) == [f"{tmp_path / name}.partial is in the way, and no conversion made it"] * 3
    exists, *_, overwritten = checked(tmp_path / "home")
    assert "exists already" in exists
    assert "has no conversion.json of kvfold, so --overwrite leaves it alone" in overwritten
    (tmp_path / "home" / "config.json").write_text('{"model_type": "llama"}')
    assert len(checked(tmp_path / "home")) == 3, "a checkpoint that others made"
    (tmp_path / "out.partial" / "thesis.txt").rename(tmp_path / "thesis.txt")
    for _ in range(2):
        make(tmp_path / "out", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.old", "other.partial", "home", "thesis.txt"}


def test_an_output_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    linked = tmp_path / "disk"
    linked.mkdir()
    (tmp_path / "link").symlink_to(linked)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a-file").write_text("years")
    os.mkfifo(tmp_path / "pipe")
    said = {
        "link": f"is a link to {linked}", "dangling": "is a link to", "a-file": "is not a directory",
        "pipe": "is not a directory", "a-file/out": "which is not a directory", "/dev/null": "is not a directory",
        "/dev": "exists already",
    }  # fmt: skip
    if os.path.ismount("/dev"):
        said["/dev"] = "is a mount point"
    for name, message in said.items():
        refusals = checked(tmp_path / name)
        assert len(refusals) == 3
        assert all(message in refusal for refusal in refusals[: 1 if name == "/dev" else 3]), name


@pytest.mark.parametrize("out", ["source", "source/inside", ".", "model"])
def test_an_output_around_or_inside_the_source_is_refused(out: str, tmp_path: Path) -> None:
    """Also where its work directory would be the source."""
    source = tmp_path / ("model.partial" if out == "model" else "source")
    source.mkdir()
    assert any("lie inside each other" in said for said in checked(tmp_path / out, source))


def test_an_evaluation_that_fails_does_not_lose_the_conversion(
    shelf: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["gqa", shelf(), tmp_path / "out", "--groups", 2, "--method", "mean"]
    with monkeypatch.context() as patch:
        patch.setattr("convert.output.evaluation.report_of", raising(Refusal("no such device")))
        failed = convert(*command, "--evaluate", words)
    assert failed.exit_code == 1
    assert "the conversion is done, its evaluation failed: no such device" in failed.stderr
    written = next((tmp_path / "out.partial").rglob(SHARD)).stat().st_mtime_ns
    ok(convert(*command, "--resume"))
    assert (tmp_path / "out" / SHARD).stat().st_mtime_ns == written
