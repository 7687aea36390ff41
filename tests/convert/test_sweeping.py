"""`convert sweep`: all targets from one survey into one report, and what an interruption or a mistake costs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from written import Convert, Make, ok, refused, same_but_for_the_run

from attention.errors import Refusal
from convert import sweeping as module
from convert.calibration.survey import Moments
from convert.checkpoint.shelf import Shelf

NAMES = [
    *(f"gqa-{groups}-{method}" for groups in (2, 1) for method in ("aligned", "mean", "first")),
    *(f"mla-{size}-{method}" for size in ("16+8", "50%") for method in ("weighted", "svd", "pca")),
]
TARGETS = ["--groups", "2,1", "--mla", "16+8,50%"]
FEW = ["--groups", "2,1", "--methods", "mean,aligned"]


def written_text(path: Path, seed: int) -> Path:
    drawn = torch.randint(97, 123, (1500,), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text("".join(map(chr, drawn)))
    return path


@pytest.fixture(autouse=True)
def drawings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn for one test; reports have tests of their own."""
    if request.function is not test_all_targets_come_from_one_survey_into_one_report:
        monkeypatch.setattr("eval.report.plot.to_svg", lambda models: "<svg/>")


@pytest.fixture
def on(tmp_path: Path) -> list[Any]:
    """What is calibrated on."""
    return calibrated_on(tmp_path)


@pytest.fixture
def held_out(tmp_path: Path) -> list[Any]:
    """What is measured on."""
    return measured_on(tmp_path)


def calibrated_on(directory: Path, tokens: int = 256) -> list[Any]:
    return ["--text", written_text(directory / "text.txt", 0), "--calibration-tokens", tokens, "--calibration-context", 64]


def measured_on(directory: Path) -> list[Any]:
    return ["--evaluate", written_text(directory / "held-out.txt", 1), "--max-tokens", 256, "--json", "-q"]


@dataclass(frozen=True)
class Swept:
    """A sweep that is finished. Tests change copies of its results."""

    source: Path
    command: list[Any]
    out: Path
    stdout: str

    def again(self, directory: Path) -> Path:
        return Path(shutil.copytree(self.out, directory / "out"))

    def said_of(self, out: Path) -> str:
        """What it would have said of an OUTPUT elsewhere."""
        return self.stdout.replace(str(self.out), str(out))


@pytest.fixture(scope="module")
def swept(shelf: Callable[..., Path], convert: Convert, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    source, directory = shelf(), tmp_path_factory.mktemp("swept")
    command = [*FEW, *calibrated_on(directory), *measured_on(directory)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.report.plot.to_svg", lambda models: "<svg/>")
        said = ok(convert("sweep", source, directory / "out", *command)).stdout
    return Swept(source, command, directory / "out", said)


def results(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix not in (".json", ".lock"))


def planned(result: Any) -> list[str]:
    """The results that a dry run names."""
    return [Path(plan["output"]).name for plan in json.loads(ok(result).stdout)]


def test_all_targets_come_from_one_survey_into_one_report(
    checkpoint: Make, convert: Convert, on: list[Any], held_out: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, surveyed = Shelf.put, []

    def note(self: Shelf, layer: int, tensors: Any, note: Any) -> None:
        if "second_moment" in tensors:
            surveyed.append(layer)
        put(self, layer, tensors, note)

    monkeypatch.setattr(Shelf, "put", note)
    out = tmp_path / "out"
    report = json.loads(ok(convert("sweep", checkpoint(), out, *TARGETS, *on, *held_out)).stdout)
    assert surveyed == [0, 1, 2]
    assert results(out) == sorted([*NAMES, "report"]), "no survey is left"
    assert sorted(path.name for path in (out / "report").iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads((out / "report" / "report.json").read_text()) == report
    source, *others = report["models"]
    assert (source["name"], source["kl_to_source"], source["top1_agreement"]) == ("source", 0, 1)
    assert [entry["name"] for entry in others] == NAMES
    (calibration,) = {e["calibration_hash"] for e in others if e["method"] in ("aligned", "weighted", "pca")}
    assert calibration.startswith("sha256:")
    assert {e["calibration_hash"] for e in [source, *others] if e["method"] in (None, "mean", "first", "svd")} == {None}
    assert {entry["kind"] for entry in others if "%" not in entry["name"]} == {"GQA-2", "MQA", "MLA-16+8"}
    assert [e["kv_bytes_per_token"] for e in others if "50%" in e["name"]] == [384] * 3, "however each splits it"
    assert all(entry["kv_bytes_per_token"] == entry["kv_bytes_measured"] for entry in report["models"])


def test_each_result_is_what_its_own_command_makes(
    checkpoint: Make, convert: Convert, on: list[Any], held_out: list[Any], tmp_path: Path
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    ok(convert("sweep", source, out, *TARGETS, "--methods", "aligned,mean,weighted,pca", *on, "--refine", 2, *held_out))
    commands: dict[str, list[Any]] = {
        "gqa-2-aligned": ["gqa", "--groups", 2, *on, "--refine", 2],
        "gqa-1-mean": ["gqa", "--groups", 1, "--method", "mean"],
        "mla-16+8-weighted": ["mla", "--kv-lora-rank", 16, "--qk-rope-head-dim", 8, *on, "--refine", 2],
        "mla-50%-pca": ["mla", "--kv-budget", "50%", "--method", "pca", *on],
    }
    for name, (command, *options) in commands.items():
        ok(convert(command, source, tmp_path / name, *options))
        same_but_for_the_run(out / name, tmp_path / name)


def test_two_sweeps_write_the_same_bytes(swept: Swept, convert: Convert, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert ok(convert("sweep", swept.source, out, *swept.command)).stdout == swept.said_of(out)
    for name in ("gqa-2-aligned", "gqa-1-mean"):
        same_but_for_the_run(out / name, swept.out / name)


def test_a_directory_of_the_user_that_is_named_as_the_survey_stays(
    checkpoint: Make, convert: Convert, on: list[Any], held_out: list[Any], tmp_path: Path
) -> None:
    mine = tmp_path / "out" / "survey" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years")
    ok(convert("sweep", checkpoint(), tmp_path / "out", "--groups", 2, "--methods", "aligned", *on, *held_out))
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("when", ["between", "evaluated"])
def test_a_source_that_changes_between_conversions_is_refused(
    when: str, checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, name = checkpoint(), "convert" if when == "between" else "report_of"
    work = getattr(module, name)

    def changing(*given: Any, **more: Any) -> Any:
        done = work(*given, **more)
        os.utime(source / "model.safetensors", ns=(0, 0))
        return done

    monkeypatch.setattr(module, name, changing)
    result = convert("sweep", source, tmp_path / "out", "--groups", "2,1", "--methods", "mean", *held_out)
    refused(result, 1, "model.safetensors has changed since this run began")
    assert sorted({"gqa-1-mean", "report"} & set(results(tmp_path / "out"))) == ([] if when == "between" else ["gqa-1-mean"])


def test_without_targets_heads_are_halved_and_caches_shared_out(
    checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    assert planned(convert("sweep", checkpoint(), tmp_path / "out", *held_out, "--dry-run")) == [
        *(f"gqa-{groups}-{method}" for groups in (2, 1) for method in ("aligned", "mean", "first")),
        *(f"mla-{share}%-{method}" for share in ("25", "12.5") for method in ("weighted", "svd")),
    ], "pca needs text"


def test_a_source_that_cannot_become_mla_is_swept_without(
    checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    ok(convert("sweep", checkpoint("hunyuan_v1_dense"), tmp_path / "out", "--methods", "mean", *held_out))
    assert results(tmp_path / "out") == ["gqa-1-mean", "gqa-2-mean", "report"]
    every = planned(convert("sweep", tmp_path / "source", tmp_path / "all", *held_out, "--dry-run"))
    assert every == [f"gqa-{groups}-{method}" for groups in (2, 1) for method in ("aligned", "mean", "first")]
    named = convert("sweep", tmp_path / "source", tmp_path / "no", "--mla", "16+8", *held_out)
    refused(named, 2, "no output class carries MLA of")


def test_a_latent_is_swept_to_smaller_latents(checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path) -> None:
    ok(convert("mla", checkpoint(), tmp_path / "large", "--kv-lora-rank", 33, "--qk-rope-head-dim", 32))
    said = ok(convert("sweep", tmp_path / "large", tmp_path / "out", *[option for option in held_out if option != "-q"]))
    assert results(tmp_path / "out") == sorted(
        ["report", *(f"mla-{share}%-{method}" for share in ("25", "12.5") for method in ("weighted", "svd"))]
    )
    assert "warning: gqa-4-aligned is left out: MLA-33+32 has a latent and no KV heads to merge" in said.stderr


# ---- interruption ----------------------------------------------------------------------------------------------------


STOP, FULL = KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")


def times_of(directory: Path) -> dict[str, int]:
    return {path.name: (path / "model.safetensors").stat().st_mtime_ns for path in directory.glob("*-*[!l]") if path.is_dir()}


@pytest.mark.parametrize(
    ("place", "how"), [("between conversions", STOP), ("within one", FULL), ("while it evaluates", STOP)], ids=str
)
def test_an_interrupted_sweep_goes_on_and_makes_nothing_twice(
    place: str, how: BaseException, swept: Swept, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import convert.execute.weights as execute

    owner, name, count = {
        "between conversions": (module, "convert", 3),
        "within one": (execute, "write_shard", 3),
        "while it evaluates": (module, "report_of", 1),
    }[place]
    function, left = getattr(owner, name), [count]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise how
        return function(*args, **kwargs)

    source, out, command = swept.source, tmp_path / "out", swept.command
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        stopped = convert("sweep", source, out, *command)
    assert stopped.exit_code == (1 if isinstance(how, OSError) else 130)
    assert ("No space left on device" if isinstance(how, OSError) else "interrupted") in stopped.stderr
    assert "--resume" in stopped.stderr
    finished = times_of(out)
    assert len(finished) == (4 if place == "while it evaluates" else 2)
    assert not (out / "report").exists()
    refused(convert("sweep", source, out, *command), 2, "exists already")
    assert ok(convert("sweep", source, out, *command, "--resume")).stdout == swept.said_of(out)
    after = times_of(out)
    assert len(after) == 4
    assert all(after[name] == when for name, when in finished.items()), "made again"
    for name in after:
        same_but_for_the_run(out / name, swept.out / name)
    assert results(out) == results(swept.out)


KILLED = """
import os, signal, sys
import convert.execute.weights as execute
from convert.command.cli import main
write, count = execute.write_shard, 0
def dying(*arguments):
    global count
    count += 1
    if count == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
execute.write_shard = dying
main(sys.argv[1:], prog_name="convert")
"""


def test_a_killed_sweep_uses_its_survey_again(
    checkpoint: Make, convert: Convert, on: list[Any], held_out: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    command = ["sweep", source, out, "--groups", "2,1", "--methods", "aligned", "--no-refit", *on, *held_out]
    done = run_forked(KILLED, *command)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert results(out) == ["gqa-1-aligned.partial", "gqa-2-aligned", "survey"]
    monkeypatch.setattr(Moments, "statistics", lambda self: pytest.fail("surveyed again"))
    with monkeypatch.context() as patch:
        patch.setattr("convert.execute.inputs.versions", lambda: {"torch": "another"})
        with pytest.raises(pytest.fail.Exception, match="surveyed again"):
            convert(*command, "--resume", "--overwrite")
    shutil.rmtree(out / "gqa-1-aligned.partial")
    ok(convert(*command, "--resume"))
    assert results(out) == ["gqa-1-aligned", "gqa-2-aligned", "report"]


def test_a_dry_run_says_what_would_be_made_and_makes_nothing(
    checkpoint: Make, convert: Convert, on: list[Any], held_out: list[Any], tmp_path: Path
) -> None:
    command = ["sweep", checkpoint(), tmp_path / "out", *TARGETS, *on, *[o for o in held_out if o != "--json"], "--dry-run"]
    said = ok(convert(*command)).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == NAMES
    # The source caches 3 layers × 64 values × 4 bytes.
    assert {(row[1], row[3], row[4]) for row in rows if "gqa-2" in row[0]} == {("GQA-2", "384", "50.0%")}
    assert planned(convert(*command, "--json")) == NAMES
    assert not (tmp_path / "out").exists()


def test_a_finished_sweep_is_resumed_without_work_and_grows(
    swept: Swept, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = swept.again(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("convert.converting.convert_layers", lambda *_: pytest.fail("made again"))
        assert ok(convert("sweep", swept.source, out, *swept.command, "--resume")).stdout == swept.said_of(out)
    times = times_of(out)
    more = ["--groups", "2,1", "--mla", "16+8", "--methods", "mean,aligned,svd", *swept.command[len(FEW) :]]
    report = json.loads(ok(convert("sweep", swept.source, out, *more, "--resume")).stdout)
    assert len(report["models"]) == 1 + 5
    after = times_of(out)
    assert all(after[name] == when for name, when in times.items())


def test_a_resumed_sweep_makes_again_only_what_other_settings_change(
    swept: Swept, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    out = swept.again(tmp_path)
    before, command = times_of(out), ["sweep", swept.source, out, *FEW, *calibrated_on(tmp_path, 128), *held_out, "--resume"]
    refused(convert(*command), 2, "gqa-2-aligned exists already, and was made by another command")
    assert times_of(out) == before
    ok(convert(*command, "--overwrite"))
    assert {name for name, when in times_of(out).items() if when != before[name]} == {"gqa-2-aligned", "gqa-1-aligned"}


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_results_that_are_there_are_left_alone(swept: Swept, convert: Convert, held_out: list[Any], tmp_path: Path) -> None:
    out = swept.again(tmp_path)
    before = times_of(out)
    refused(convert("sweep", swept.source, out, *FEW, *held_out), 2, "exists already")
    assert times_of(out) == before
    ok(convert("sweep", swept.source, out, *FEW, *held_out, "--overwrite"))
    after = times_of(out)
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in after)


MISTAKES: dict[str, tuple[list[Any], str]] = {
    "groups that are no number": (["--groups", "x"], "'x' is not a valid integer"),
    "groups that do not divide": (["--groups", "2,3"], "cannot make 3 groups from 4 KV heads"),
    "no groups": (["--groups", ""], "not a valid integer"),
    "half a latent": (["--mla", "5+"], "invalid budget '5+'"),
    "a latent too large": (["--mla", "99+32"], "rank 99 exceeds full size"),
    "an unknown method": (["--methods", "mean,magic"], "'magic' is not one of"),
    "a method for other targets": (["--groups", 2, "--methods", "mean,svd"], "svd of --methods can make none of the targets"),
    "a method that needs text": (["--mla", "16+8", "--methods", "pca"], "method pca needs text to calibrate on"),
    "steps without text": (["--groups", 2, "--methods", "aligned", "--refine", 2], "--refine is about calibration text"),
    "default targets, steps without text": (["--refine", 2], "--refine is about calibration text, and there is none"),
    "default targets, no such device": (["--device", "quantum"], "no device 'quantum'"),
    "default targets, blocks that are too long": (
        ["--text", "TEXT", "--calibration-context", 4096], "a calibration context of 4096 tokens exceeds the 128 positions",
    ),
    "default targets, fewer tokens than a block": (
        ["--text", "TEXT", "--calibration-tokens", 16, "--calibration-context", 32], "16 calibration tokens are less than one",
    ),
    "text for no method": (["--methods", "mean,svd", "--text", "TEXT"], "no method of this sweep has any use for --text"),
    "steps for no method": (
        ["--methods", "mean,pca", "--text", "TEXT", "--refine", 2, "--refit"],
        "no method of this sweep has any use for --refine and --refit",
    ),
    "text and none": (["--text", "TEXT", "--no-text"], "give either a text to calibrate on or --no-text"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused_before_any_work(
    case: str, checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    arguments, message = MISTAKES[case]
    source = checkpoint()
    (source / "model.safetensors").unlink()
    given = [held_out[1] if argument == "TEXT" else argument for argument in arguments]
    refused(convert("sweep", source, tmp_path / "out", *given, *held_out), 2, message)
    assert not (tmp_path / "out").exists()


def test_a_text_of_less_than_a_block_is_seen_before_any_work(
    checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "three.txt").write_text("cat")
    given = ["--groups", 2, "--text", tmp_path / "three.txt", *held_out]
    refused(convert("sweep", checkpoint(), tmp_path / "out", *given), 1, "three.txt has 3 tokens, fewer than one block of 128")
    assert not (tmp_path / "out").exists()


def test_a_source_of_experts_is_swept_like_any_other(
    checkpoint: Make, convert: Convert, on: list[Any], held_out: list[Any], tmp_path: Path
) -> None:
    ok(convert("sweep", checkpoint("qwen3_moe"), tmp_path / "out", *FEW, *on, *held_out))
    assert results(tmp_path / "out") == sorted(["report", *(f"gqa-{n}-{m}" for n in (2, 1) for m in ("aligned", "mean"))])


def test_the_report_of_an_earlier_sweep_is_left_alone(
    checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    ok(convert("sweep", source, out, "--groups", 2, "--methods", "mean", *held_out))
    before, other = (out / "report" / "report.json").read_bytes(), ["--groups", 1, "--methods", "mean", *held_out]
    refused(convert("sweep", source, out, *other), 2, "report exists: an earlier sweep's report")
    assert (out / "report" / "report.json").read_bytes() == before
    assert not (out / "gqa-1-mean").exists()
    for flag in ("--resume", "--overwrite"):
        report = json.loads(ok(convert("sweep", source, out, *other, flag)).stdout)
        assert [entry["name"] for entry in report["models"]] == ["source", "gqa-1-mean"]


def test_a_sweep_needs_held_out_text(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    refused(convert("sweep", source, tmp_path / "out"), 2, "Missing option '--evaluate'")
    refused(convert("sweep", source, tmp_path / "out", "--evaluate", tmp_path / "none"), 2, "does not exist")
    (tmp_path / "empty.txt").write_text(" \n")
    refused(convert("sweep", source, tmp_path / "out", *FEW, "--evaluate", tmp_path / "empty.txt"), 1, "is empty")
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_a_file_or_the_model_is_refused(
    checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    source = checkpoint()
    (tmp_path / "file").write_text("")
    for targets in ([], FEW):
        refused(convert("sweep", source, tmp_path / "file", *targets, *held_out), 2, "lies in a file")
        refused(convert("sweep", source, source, *targets, *held_out), 2, "lie inside each other")


def test_a_resumed_sweep_names_the_split_that_was_chosen(checkpoint: Make, on: list[Any], tmp_path: Path) -> None:
    from convert import sweep

    source, text, made = checkpoint(), on[1], [list[str](), list[str]()]
    given = {"text": text, "calibration_tokens": 256, "calibration_context": 32, "max_tokens": 256, "device": "cpu"}
    for resume, names in zip((False, True), made, strict=True):
        done = sweep(
            source, tmp_path / "out", evaluate=text, mla=["40%"], methods=["weighted"], **given, resume=resume,
            made=lambda plan, names=names: names.append(plan.target.spec.kind),
        )  # fmt: skip
        assert [plan.target.spec.kind for plan in done.plans] == names
        assert names == [entry["kind"] for entry in done.report["models"][1:]]
    assert made[0] == made[1]


def test_a_target_that_is_named_twice_is_made_once(checkpoint: Make, tmp_path: Path) -> None:
    from convert import sweep

    wanted = {"evaluate": ["words"], "dry_run": True}
    done = sweep(checkpoint(), tmp_path / "out", groups=(2, 2), methods=["mean"], **wanted)
    assert [plan.output.path.name for plan in done.plans] == ["gqa-2-mean"]
    with pytest.raises(Refusal, match=r"two targets would both be named mla-33\.3333%-svd"):
        sweep(tmp_path / "source", tmp_path / "out", mla=["33.3333%", "33.33333%"], methods=["svd"], **wanted)
