"""The work directory: what is trusted after an interruption, what any damage to it leads to, and when it is removed."""

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
from safetensors.torch import save_file
from tiny import save_tokenizer, tiny_config, tiny_model
from written import Convert, Make, ok, same_but_for_the_run

from attention.errors import Failure, Interrupted, KvfoldError, Refusal
from convert.checkpoint.writer import write_shard
from convert.output.destination import check_output, finished, partial_path, read_provenance
from convert.output.workdir import WorkDirectory
from eval.inputs.sealed import checksum

PLAN = {"command": "gqa", "groups": 2}

DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a flipped bit in the middle": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a list": lambda path: path.write_bytes(b"[1, 2]"),
    "a string": lambda path: path.write_bytes(b'"x"'),
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


def run(*arguments: object) -> Result:
    from convert.command.cli import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def shard(work: WorkDirectory, name: str = "model.safetensors", value: float = 1.0) -> str:
    return write_shard(work.path / name, {"x": torch.full((64,), value)}, {"x": torch.float32})


# ---- what is trusted -------------------------------------------------------------------------------------------------


def test_a_noted_shard_is_done_also_for_the_next_run(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "out", PLAN, False, False)
    assert work.done("model.safetensors") is None
    work.note("model.safetensors", [{"layer": 0, "converted": ["x"]}], shard(work))
    assert work.done("model.safetensors") == [{"layer": 0, "converted": ["x"]}]
    again = WorkDirectory(tmp_path / "out", PLAN, True, False)
    assert again.done("model.safetensors") == [{"layer": 0, "converted": ["x"]}]
    again.done("model.safetensors").clear()
    assert again.done("model.safetensors"), "what a caller does to it is the caller's"


def test_a_checksum_that_is_not_given_is_taken_from_the_file(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "out", PLAN, False, False)
    shard(work)
    work.note("model.safetensors", [])
    assert WorkDirectory(tmp_path / "out", PLAN, True, False).done("model.safetensors") == []


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("victim", ["checkpoint/model.safetensors", "notes/model.safetensors.json"])
def test_a_shard_or_note_that_changed_is_not_done(victim: str, damage: str, tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "out", PLAN, False, False)
    work.note("model.safetensors", [{"layer": 0}], shard(work))
    DAMAGE[damage](partial_path(tmp_path / "out") / victim)
    assert WorkDirectory(tmp_path / "out", PLAN, True, False).done("model.safetensors") is None


def test_a_shard_is_read_for_its_checksum_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkDirectory(tmp_path / "out", PLAN, False, False)
    work.note("model.safetensors", [], shard(work))
    read: list[Path] = []
    monkeypatch.setattr("convert.output.workdir.checksum", lambda path: read.append(path) or checksum(path))
    assert work.done("model.safetensors") == []
    assert not read, "it was hashed as it was written"
    resumed = WorkDirectory(tmp_path / "out", PLAN, True, False)
    for _ in range(3):
        assert resumed.done("model.safetensors") == []
    assert len(read) == 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_remembered_is_recalled_whole_or_not(damage: str, tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "out", PLAN, False, False)
    assert work.recall("decision") is None
    work.remember("decision", {"pairs": [1, 2], "error": 0.25})
    resumed = WorkDirectory(tmp_path / "out", PLAN, True, False)
    assert resumed.recall("decision") == {"pairs": [1, 2], "error": 0.25}
    DAMAGE[damage](work.survey / "decision.json")
    assert resumed.recall("decision") is None


def test_a_note_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkDirectory(tmp_path / "out", PLAN, False, False)
    synced: list[str] = []
    sync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    work.note("model.safetensors", [], shard(work))
    assert synced == ["model.safetensors.tmp", "checkpoint", "model.safetensors.json.tmp", "notes"]


def test_everything_is_on_the_disk_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, out = WorkDirectory(tmp_path / "out", PLAN, False, False), tmp_path / "out"
    shard(work)
    (work.path / "config.json").write_text("{}")
    (work.path / "additional_chat_templates").mkdir()
    (work.path / "additional_chat_templates" / "a.jinja").write_text("")
    before: set[str] = set()
    after: list[str] = []
    sync = os.fsync

    def seen(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        after.append(name) if out.exists() else before.add(name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    work.publish()
    assert before >= {"model.safetensors", "config.json", "additional_chat_templates", "a.jinja", "checkpoint", "out.partial"}
    assert after == ["out.partial", tmp_path.name]


# ---- damage, end to end ----------------------------------------------------------------------------------------------


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


def stopped(directory: Path, *command: object) -> Stopped:
    from convert.execute import weights as module

    source, out, write, count = directory / "source", directory / "stopped", module.write_shard, [0]
    tiny_model(tiny_config("llama", num_hidden_layers=2)).save_pretrained(source)
    save_tokenizer(source)
    (directory / "text.txt").write_text("a line of text, and another\n" * 60)

    def interrupted(*given: Any) -> str:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_shard", interrupted)
        left = run(command[0], source, out, *command[1:])
    assert left.exit_code == 130, left.output
    ok(run(command[0], source, directory / "whole", *command[1:]))
    return Stopped(source, list(command), partial_path(out), directory / "whole")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    return stopped(tmp_path_factory.mktemp("grouped"), "gqa", "--groups", 2, "--method", "mean", "--max-shard-size", "20KB")


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    directory = tmp_path_factory.mktemp("latent")
    text = ["--text", directory / "text.txt", "--calibration-context", 32, "--calibration-tokens", 128]
    return stopped(directory, "mla", "--kv-budget", "50%", *text, "--max-shard-size", "20KB", "-q")


def one_line(result: Result) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2), result.output
    first, *hints = [line for line in result.stderr.splitlines() if not line.startswith("convert: ")]
    assert first.startswith("error: ")
    assert len(hints) == 1
    assert hints[0].startswith("hint: ")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("victim", ["inputs.json", "notes/*", "checkpoint/*.safetensors"])
def test_a_damaged_file_of_a_conversion_is_made_again(victim: str, damage: str, grouped: Stopped, tmp_path: Path) -> None:
    out = grouped.again(tmp_path)
    DAMAGE[damage](min(partial_path(out).glob(victim)))
    result = grouped.resume(out)
    if result.exit_code:
        one_line(result)
        # Another plan, as far as can be seen; or something that no run has put there. Neither is thrown away unasked.
        assert damage in (("a flipped bit in the middle", "other keys") if victim == "inputs.json" else ("a directory",))
        ok(grouped.resume(out, "--overwrite") if victim == "inputs.json" else cleared(out, victim, grouped))
    same_but_for_the_run(out, grouped.whole)
    assert not partial_path(out).exists()


@pytest.mark.parametrize("damage", ["a flipped bit in the middle", "a link to nothing"])
@pytest.mark.parametrize("victim", ["survey/decision.jso*", "survey/source-*", "survey/layer-*"])
def test_a_damaged_file_of_a_survey_is_made_again(victim: str, damage: str, latent: Stopped, tmp_path: Path) -> None:
    out = latent.again(tmp_path)
    DAMAGE[damage](min(partial_path(out).glob(victim)))
    result = latent.resume(out)
    if result.exit_code:
        one_line(result)
        assert damage in ("a directory", "a link to nothing")
        ok(cleared(out, victim, latent))
    same_but_for_the_run(out, latent.whole)


def cleared(out: Path, victim: str, of: Stopped) -> Result:
    """Resume when what the message named has been moved away, as its hint says."""
    named = min(partial_path(out).glob(victim))
    named.unlink() if named.is_symlink() else shutil.rmtree(named)
    return of.resume(out)


@pytest.mark.parametrize("kind", ["a file", "a link", "nothing"])
@pytest.mark.parametrize("part", ["notes", "survey", "checkpoint"])
def test_a_damaged_directory_is_made_again(part: str, kind: str, grouped: Stopped, tmp_path: Path) -> None:
    out, elsewhere = grouped.again(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("years")
    shutil.rmtree(partial_path(out) / part)
    if kind == "a file":
        (partial_path(out) / part).write_text("")
    elif kind == "a link":
        (partial_path(out) / part).symlink_to(elsewhere)
    ok(grouped.resume(out))
    same_but_for_the_run(out, grouped.whole)
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("damage", [name for name in DAMAGE if "flipped" not in name])
def test_a_damaged_mark_of_publishing_is_refused(damage: str, grouped: Stopped, tmp_path: Path) -> None:
    """OUTPUT may be the new one or an old one: nobody knows."""
    out = grouped.again(tmp_path)
    shutil.copytree(grouped.whole, out)
    (partial_path(out) / "inputs.json").rename(partial_path(out) / "published.json")
    shutil.rmtree(partial_path(out) / "checkpoint")
    DAMAGE[damage](partial_path(out) / "published.json")
    result = grouped.resume(out)
    one_line(result)
    assert "exists already" in result.stderr or damage == "other keys"  # which is another plan, as far as can be seen
    ok(grouped.resume(out, "--overwrite"))
    same_but_for_the_run(out, grouped.whole)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_provenance_of_a_published_conversion_is_refused(damage: str, grouped: Stopped, tmp_path: Path) -> None:
    """It was stopped while it cleaned up, and conversion.json at OUTPUT has been damaged since."""
    out = grouped.again(tmp_path)
    shutil.copytree(grouped.whole, out)
    (partial_path(out) / "inputs.json").rename(partial_path(out) / "published.json")
    shutil.rmtree(partial_path(out) / "checkpoint")
    DAMAGE[damage](out / "conversion.json")
    result = grouped.resume(out)
    if damage != "a flipped bit in the middle" or result.exit_code:  # it may be in a part that says nothing of the recipe
        one_line(result)
        assert "its conversion.json is damaged" in result.stderr
        ok(run(grouped.command[0], grouped.source, out, *grouped.command[1:], "--overwrite"))
        same_but_for_the_run(out, grouped.whole)
    assert not partial_path(out).exists()


# ---- when it is removed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "stays"),
    [(Refusal("no"), False), (Failure("bad data"), False), (Interrupted("stop"), True), (KeyboardInterrupt(), True),
     (OSError(errno.ENOSPC, "full"), True), (RuntimeError("a bug"), True)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize("kept", [True, False], ids=["kept", ""])
def test_what_a_run_leaves_depends_on_why_it_ended(error: BaseException, stays: bool, kept: bool, tmp_path: Path) -> None:
    with pytest.raises(type(error)), WorkDirectory.opened(tmp_path / "out", PLAN, False, False) as work:  # noqa: PT012
        work.note("model.safetensors", [], shard(work))
        if kept:
            work.keep()
        raise error
    assert partial_path(tmp_path / "out").exists() == (stays or kept)


def test_a_run_that_is_refused_the_directory_leaves_it_alone(tmp_path: Path) -> None:
    with WorkDirectory.opened(tmp_path / "out", PLAN, False, False) as work:
        work.note("model.safetensors", [], shard(work))
    with (
        pytest.raises(Refusal, match="groups: 2 then, 1 now"),
        WorkDirectory.opened(tmp_path / "out", PLAN | {"groups": 1}, True, False),
    ):
        pass
    assert WorkDirectory(tmp_path / "out", PLAN, True, False).done("model.safetensors") == []


def test_a_failure_behind_publishing_leaves_what_resume_needs(tmp_path: Path) -> None:
    with pytest.raises(Failure), WorkDirectory.opened(tmp_path / "out", PLAN, False, False) as work:  # noqa: PT012
        shard(work)
        work.publish()
        raise Failure("the ledger")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert WorkDirectory(tmp_path / "out", PLAN, True, False).published


def test_too_little_space_removes_what_is_of_no_use(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Failure, match="no space"), WorkDirectory.opened(out, PLAN, False, False) as work:
        work.require_space(2**62)
    assert not partial_path(out).exists()
    with pytest.raises(Failure, match="no space") as caught, WorkDirectory.opened(out, PLAN, False, False) as work:  # noqa: PT012
        work.note("model.safetensors", [], shard(work))
        work.require_space(2**62)
    assert "--resume" in str(caught.value.hint)
    assert WorkDirectory(out, PLAN, True, False).done("model.safetensors") == []


@pytest.mark.parametrize("place", ["write_config", "copy_companions", "provenance_of", "model_card", "decide"])
@pytest.mark.parametrize("error", [Refusal("late"), Failure("late")], ids=["Refusal", "Failure"])
def test_a_late_refusal_leaves_nothing_behind(
    error: KvfoldError, place: str, checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"convert.execute.run.{place}", refuse)
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--method", "mean")
    assert result.exit_code == error.exit_code
    assert "error: late" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_an_evaluation_that_is_refused_does_not_lose_the_conversion(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Refusal("no such device")

    text, command = tmp_path / "text.txt", ["gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--method", "mean"]
    text.write_text("a line of text, and another\n" * 40)
    with monkeypatch.context() as patch:
        patch.setattr("convert.output.life.report_of", refuse)
        result = convert(*command, "--evaluate", text)
    assert result.exit_code == 1
    assert "the conversion is done, its evaluation failed: no such device" in result.stderr
    written = next((tmp_path / "out.partial").rglob("model.safetensors")).stat().st_mtime_ns
    ok(convert(*command, "--resume"))
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == written


def test_a_checkpoint_that_stepped_aside_twice_is_replaced(tmp_path: Path) -> None:
    """A run was killed between its two renames, and the user has put something at OUTPUT since."""
    out = tmp_path / "out"
    for name in ("out", "out.partial/replaced"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "out.partial" / "inputs.json").write_text(json.dumps(PLAN))
    work = WorkDirectory(out, PLAN, True, True)
    shard(work)
    work.publish()
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


# ---- a conversion that is finished -----------------------------------------------------------------------------------


def test_resuming_what_is_finished_says_so_and_does_nothing(grouped: Stopped, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(grouped.whole, out)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    result = ok(grouped.resume(out))
    assert "is finished already" in result.stderr
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert not partial_path(out).exists()


def test_resuming_a_finished_budget_reports_the_split_that_was_chosen(latent: Stopped, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(latent.whole, out)
    facts = json.loads(ok(latent.resume(out, "--json")).stdout)
    assert facts["kv_lora_rank"] == json.loads((out / "config.json").read_text())["kv_lora_rank"]
    (tmp_path / "moved.txt").write_text((latent.source.parent / "text.txt").read_text())
    moved = [tmp_path / "moved.txt" if isinstance(given, Path) else given for given in latent.command[1:]]
    assert run("mla", latent.source, out, *moved, "--resume").exit_code == 0, "where the text lies does not matter"
    (tmp_path / "moved.txt").write_text("some other text, as long as it has to be\n" * 60)
    other = run("mla", latent.source, out, *moved, "--resume")
    assert other.exit_code == 2
    assert "made by another recipe" in other.stderr


def test_resuming_another_conversion_is_refused(grouped: Stopped, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(grouped.whole, out)
    result = run("gqa", grouped.source, out, "--groups", 1, "--method", "mean", "--resume")
    assert result.exit_code == 2
    assert "exists already, and was made by another recipe" in result.stderr
    assert "--overwrite" in result.stderr
    for file in out.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
        break
    assert "exists already, and is not whole" in grouped.resume(out).stderr


@pytest.mark.parametrize("damage", DAMAGE)
def test_provenance_that_cannot_be_read_is_none_of_ours(damage: str, grouped: Stopped, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(grouped.whole, out)
    DAMAGE[damage](out / "conversion.json")
    result = grouped.resume(out)
    if damage == "a flipped bit in the middle" and result.exit_code == 0:
        return  # it was in a part that says nothing of the recipe
    one_line(result)
    assert "exists already" in result.stderr


@pytest.mark.parametrize(
    "recipe", [None, 5, "gqa", [], {}, {"gqa": None}, {"gqa": [1]}, {"gqa": {"groups": "2"}}, {"mla": {"groups": 2}}]
)
def test_other_recipes_are_not_the_same(recipe: Any, tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "conversion.json").write_text(json.dumps({"kvfold": "0.1.0", "recipe": recipe}))
    ours = {"gqa": {"groups": 2}}
    if isinstance(recipe, dict):
        with pytest.raises(Refusal, match="made by another recipe"):
            finished(tmp_path, [ours], [], {})
    else:
        assert not isinstance(read_provenance(tmp_path).get("recipe"), dict)
        assert finished(tmp_path, [ours], [], {}) is None
        with pytest.raises(Refusal, match="exists already"):
            check_output(tmp_path, None, False, True)
    (tmp_path / "conversion.json").write_text(json.dumps({"kvfold": "0.1.0", "recipe": ours, "calibration_hash": None}))
    check_output(tmp_path, None, False, True)
    assert finished(tmp_path, [{"gqa": {"groups": 1}}, ours], [], {}) == ours
    with pytest.raises(Refusal, match="exists already"):
        check_output(tmp_path, None, False, False)


def test_nothing_is_finished_where_nothing_is(tmp_path: Path) -> None:
    assert finished(tmp_path / "out", [{"gqa": {}}], None, {}) is None
