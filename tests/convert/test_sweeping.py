"""`convert sweep`: all targets from one survey into one report, and what an interruption or a mistake costs."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from written import Convert, Finished, Make, characters, ok, read, refused, same_but_for_the_run, stop_at

from convert import sweeping as module
from eval.inputs.sealed import Shelf

NAMES = [
    *(f"gqa-{groups}-{method}" for groups in (2, 1) for method in ("aligned", "mean")),
    *(f"mla-{size}-{method}" for size in ("16+8", "50%") for method in ("weighted", "svd", "pca")),
]
TARGETS = ["--groups", "2,1", "--mla", "16+8,50%"]
FEW = ["--groups", "2,1", "--methods", "mean,aligned"]


@pytest.fixture(scope="module", autouse=True)
def drawings() -> Iterator[None]:
    """Reports have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.report.quality.to_svg", lambda models: "<svg/>")
        yield


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What is calibrated on."""
    text = characters(tmp_path_factory.mktemp("fitted") / "text.txt", 0)
    return ["--text", text, "--calibration-tokens", 256, "--calibration-context", 64]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What is measured on."""
    text = characters(tmp_path_factory.mktemp("held-out") / "text.txt", 1)
    return ["--evaluate", text, "--max-tokens", 256, "--json", "-q"]


@pytest.fixture(scope="module")
def swept(
    shelf: Make, convert: Convert, on: list[Any], held_out: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """A sweep that is finished. Tests change copies of its results."""
    source, out, options = shelf(), tmp_path_factory.mktemp("swept") / "out", [*FEW, *on, *held_out]
    done = ok(convert("sweep", source, out, *options))
    return Finished(source, out, options, done.stdout, done.stderr)


def results(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix not in (".json", ".lock"))


def test_all_targets_come_from_one_survey_into_one_report(
    shelf: Make, convert: Convert, on: list[Any], held_out: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is what its own command makes, and a directory of the user's that is named like the survey's stays."""
    put, surveyed = Shelf.put, []

    def note(self: Shelf, layer: int, tensors: Any, note: Any) -> None:
        if "second" in tensors:
            surveyed.append(layer)
        put(self, layer, tensors, note)

    out, mine = tmp_path / "out", tmp_path / "out" / "survey" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years")
    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "put", note)
        report = json.loads(ok(convert("sweep", shelf(), out, *TARGETS, *on, *held_out)).stdout)
    assert surveyed == [0, 1, 2] * 2, "blocks of pca do not retrieve"
    assert results(out) == sorted([*NAMES, "report", "survey"])
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]
    assert sorted(path.name for path in (out / "report").iterdir()) == ["report.html", "report.json", "report.md"]
    assert read(out / "report" / "report.json") == report
    source, *others = report["models"]
    assert (source["name"], source["kl_to_source"], source["top1_agreement"]) == ("source", 0, 1)
    assert [entry["name"] for entry in others] == NAMES
    (calibration,) = {e["calibration_hash"] for e in others if e["method"] in ("aligned", "weighted", "pca")}
    assert calibration.startswith("sha256:")
    assert {e["calibration_hash"] for e in [source, *others] if e["method"] in (None, "mean", "svd")} == {None}
    assert {entry["kind"] for entry in others if "%" not in entry["name"]} == {"GQA-2", "MQA", "MLA-16+8"}
    assert [e["kv_bytes_per_token"] for e in others if "50%" in e["name"]] == [384] * 3
    assert all(entry["kv_bytes_per_token"] == entry["kv_bytes_measured"] for entry in report["models"])
    commands: dict[str, list[Any]] = {
        "gqa-2-aligned": ["gqa", "--groups", 2, *on],
        "gqa-1-mean": ["gqa", "--groups", 1, "--method", "mean"],
        "mla-50%-pca": ["mla", "--kv-budget", "50%", "--method", "pca", *on],
    }
    for name, (command, *options) in commands.items():
        ok(convert(command, shelf(), tmp_path / name, *options))
        same_but_for_the_run(out / name, tmp_path / name)


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


DRY: dict[str, tuple[str, list[Any], list[str]]] = {
    "heads are halved, caches shared out, and pca needs text": ("llama", ["--no-text"], [
        *NAMES[:4], *(f"mla-{share}%-{method}" for share in ("25", "12.5") for method in ("weighted", "svd")),
    ]),
    "no class for a latent": ("hunyuan_v1_dense", [], NAMES[:4]),
    "a target that is named twice": ("llama", ["--groups", "2,2", "--methods", "mean"], ["gqa-2-mean"]),
}  # fmt: skip


@pytest.mark.parametrize("case", DRY)
def test_a_dry_run_names_what_would_be_made(
    case: str, checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    model_type, options, names = DRY[case]
    source = checkpoint(model_type)
    (source / "model.safetensors").unlink()
    command = ["sweep", source, tmp_path / "out", *options, *held_out[:-1], "--dry-run"]
    result = ok(convert(*command))
    assert [Path(plan["output"]).name for plan in json.loads(result.stdout)] == names
    left_out = "warning: gqa-4-aligned is left out: MLA-16+8 has a latent and no KV heads to merge"
    assert (left_out in result.stderr) == (model_type == "deepseek_v3")
    table = ok(convert(*(option for option in command if option != "--json"))).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == names
    if model_type == "llama":  # it caches 3 layers × 64 values × 4 bytes
        assert {(row[1], row[3], row[4]) for row in rows if "gqa-2" in row[0]} == {("GQA-2", "384", "50.0%")}
    assert not (tmp_path / "out").exists()


STOP, FULL = KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")


def times_of(directory: Path) -> dict[str, int]:
    return {path.name: (path / "model.safetensors").stat().st_mtime_ns for path in directory.glob("*-*[!l]") if path.is_dir()}


@pytest.mark.parametrize(("place", "how"), [("within one", FULL), ("while it evaluates", STOP)], ids=str)
def test_an_interrupted_sweep_goes_on_and_makes_nothing_twice(
    place: str, how: BaseException, swept: Finished, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import convert.execute.layers as execute

    within, evaluating = (execute, "write_shard", 3), (module, "report_of", 1)
    source, out, command = swept.source, tmp_path / "out", swept.command
    with monkeypatch.context() as patch:
        stop_at(patch, *(within if place == "within one" else evaluating), how)
        stopped = convert("sweep", source, out, *command)
    assert stopped.exit_code == (1 if isinstance(how, OSError) else 130)
    assert ("No space left on device" if isinstance(how, OSError) else "interrupted") in stopped.stderr
    assert "--resume" in stopped.stderr
    finished = times_of(out)
    assert len(finished) == (4 if place == "while it evaluates" else 2)
    assert not (out / "report").exists()
    refused(convert("sweep", source, out, *command), 2, "exists already")
    assert ok(convert("sweep", source, out, *command, "--resume")).stdout == swept.stdout.replace(str(swept.path), str(out))
    after = times_of(out)
    assert len(after) == 4
    assert all(after[name] == when for name, when in finished.items()), "made again"
    for name in after:
        same_but_for_the_run(out / name, swept.path / name)
    assert results(out) == results(swept.path)


def test_a_finished_sweep_is_resumed_without_work_and_grows(
    swept: Finished, convert: Convert, held_out: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other settings change is made again, if that is asked for, and nothing else."""
    out = Path(shutil.copytree(swept.path, tmp_path / "out"))
    times = times_of(out)
    sweep = ["sweep", swept.source, out]
    refused(convert(*sweep, *FEW, *held_out), 2, "exists already")
    with monkeypatch.context() as patch:
        patch.setattr("convert.converting.convert_layers", lambda *_: pytest.fail("made again"))
        assert ok(convert(*sweep, *swept.command, "--resume")).stdout == swept.stdout.replace(str(swept.path), str(out))
    assert times_of(out) == times
    more = ["--groups", "2,1", "--mla", "16+8", "--methods", "mean,aligned,svd", *swept.command[len(FEW) :]]
    report = json.loads(ok(convert(*sweep, *more, "--resume")).stdout)
    assert len(report["models"]) == 1 + 5
    assert times_of(out).items() >= times.items()
    other = [*sweep, *swept.command, "--calibration-tokens", 128, "--resume"]
    refused(convert(*other), 2, "gqa-2-aligned exists already, and was made by another command")
    ok(convert(*other, "--overwrite"))
    after = times_of(out)
    assert {name for name, when in times.items() if after[name] != when} == {"gqa-2-aligned", "gqa-1-aligned"}


MISTAKES: dict[str, tuple[list[Any], str]] = {
    "half a latent": (["--mla", "5+"], "invalid budget '5+'"),
    "two latents of one name": (
        ["--mla", "33.3333%,33.33333%", "--methods", "svd"], "two targets would both be named mla-33.3333%-svd"
    ),
    "a method for other targets": (["--groups", 2, "--methods", "mean,svd"], "svd of --methods can make none of the targets"),
    "text for no method": (["--methods", "mean,svd", "--text", "TEXT"], "no method of this sweep has any use for --text"),
    "steps for no method": (
        ["--methods", "mean,pca", "--text", "TEXT", "--refit"],
        "no method of this sweep has any use for --refit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused_before_any_work(
    case: str, checkpoint: Make, convert: Convert, held_out: list[Any], tmp_path: Path
) -> None:
    arguments, message = MISTAKES[case]
    source = checkpoint()
    (source / "model.safetensors").unlink()
    given = [held_out[1] if argument == "TEXT" else argument for argument in arguments]
    refused(convert("sweep", source, tmp_path / "out", *held_out, *given), 2, message)
    assert not (tmp_path / "out").exists()


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
