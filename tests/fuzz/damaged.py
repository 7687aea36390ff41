"""Damage a file that a command reads, run the command, and count what must never happen.

    PYTHONPATH=tests python tests/fuzz/damaged.py [COUNT] [SEED] [KIND...]

COUNT times each, or for the kinds that are named, a file is damaged (bytes changed, its end cut off, JSON or tensors edited,
another file in its place, or none):

- config: config.json of any family; `inspect` or `plan` follows
- weights: model.safetensors of a tiny Llama; `gqa` follows
- gguf: the header of a GGUF file; `inspect` follows
- state: of the work directory of a healing that was stopped; `heal --resume` follows
- conversion: of the work directory of a conversion that was stopped; `mqa --resume` follows
- sweep: of the results of a sweep; `sweep --resume` follows
- recipe: conversion.json; `run --dry-run` follows
- provenance: conversion.json; `heal --dry-run` follows

A command may refuse in one line. It may not end in a traceback, take longer than 20 seconds, print what steers a terminal,
or end well with other weights than without the damage, or with some that transformers does not load whole.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from click.testing import CliRunner
from fuzz.mutations import bytes_changed, mutated, weights_changed
from gguf_files import model_of, write
from tiny import saved, tiny_config, tiny_model
from tiny_mla import LONGROPE, SIZES
from written import ok, raising, stop_at

from attention.errors import Interrupted
from convert.command.cli import main as convert
from convert.families import FAMILIES
from convert.healing.trainer import HealingTrainer

LIMIT = 20  # seconds for one command
TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n" * 40
CALIBRATION = ("--calibration-tokens", "512", "--calibration-context", "32", "--device", "cpu", "-q")
MEASURED = ("--max-tokens", "256", "--device", "cpu", "-q")
HEALING = ("--tokens", "384", "--context", "32", "--batch-tokens", "64", "--lr", "3e-3", "--device", "cpu", "-q")
HEAL = ("heal", "mqa", "out", "--teacher", "source", "--text", "text.txt", *HEALING)
MQA = ("mqa", "source", "out", "--text", "text.txt", "--text", "self", "--heal", "256", *CALIBRATION)
SWEEP = ("sweep", "source", "out", "--groups", "2,1", "--methods", "mean", "--no-text", "--evaluate", "text.txt", *MEASURED)

Damage = Callable[[Path, random.Random], str]


@dataclass
class Outcome:
    """What came of all cases; `wrong` names cases by kind, number, damage and what went wrong."""

    cases: int = 0
    ended_well: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.cases} cases, {self.ended_well} ended well, {len(self.wrong)} wrong", *self.wrong])


@dataclass(frozen=True)
class Work:
    """One kind of damage.

    Attributes:
        damage: Damages a copy of the directory that everything lies in, and says what was done.
        commands: One of them follows.
        check: What is wrong with what it has made in a copy, if it ended well; None if nothing is.
    """

    damage: Damage
    commands: Sequence[tuple[str, ...]]
    check: Callable[[Path], str | None] = lambda root: None


class Hang(BaseException):
    """A command ran longer than `LIMIT`. No `except Exception` catches it."""


def judged(*arguments: str) -> tuple[int | None, str | None]:
    """Run a command; its exit code, and what went wrong."""
    before = signal.signal(signal.SIGALRM, raising(Hang()))
    signal.alarm(LIMIT)
    try:
        result = CliRunner().invoke(convert, arguments, color=True)  # or click takes escapes out
    except Hang as error:
        return None, f"hang: {raised_at(error)}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return None, f"traceback: {raised_at(result.exception)}"
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    known = ("error: ", "hint: ", "warning: ", "info: ", "convert ")  # the last by `run`
    if result.exit_code not in (0, 1, 2):
        return result.exit_code, f"exit code {result.exit_code}"
    if result.exit_code and not (len(errors) == 1 and all(line.startswith(known) for line in lines)):
        return result.exit_code, f"not one line: {result.stderr[:400]!r}"
    if not result.output.replace("\n", "").isprintable():
        return result.exit_code, f"control characters: {result.output[:400]!r}"
    return result.exit_code, None


def raised_at(error: BaseException) -> str:
    """The error, and the last lines of code outside installed packages that led to it, the innermost first."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    lines = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))
    return f"{type(error).__name__}: {str(error)[:200]} ({lines})"


def configs() -> list[dict[str, Any]]:
    """Small configs of every family, whole and without defaults, and of latent attention as `convert mla` writes it."""
    known = [tiny_config(name) for name in sorted(FAMILIES)]
    known += [tiny_config("deepseek_v3", **SIZES, **rope) for rope in ({}, {"rope_parameters": dict(LONGROPE)})]
    return [json.loads(config.to_json_string(use_diff=diff)) for config in known for diff in (False, True)]


def any_file(files: Callable[[Path], list[Path]]) -> Damage:
    """To one of these files."""

    def damage(root: Path, draw: random.Random) -> str:
        file = draw.choice(files(root))
        data, how = file.read_bytes(), draw.choice(("bytes", "edited", "edited", "edited", "replaced", "removed", "emptied"))
        if how == "removed":
            file.unlink()
        elif how == "emptied":
            file.write_bytes(b"")
        elif how == "replaced":
            file.write_bytes(draw.choice(files(root)).read_bytes())
        elif how == "edited" and file.suffix == ".json":
            file.write_bytes(mutated(json.loads(data), draw))
        elif how == "edited" and file.suffix == ".safetensors":
            file.write_bytes(weights_changed(data, draw))
        else:
            file.write_bytes(bytes_changed(data, len(data), draw))
        return f"{file.relative_to(root)} {how}"

    return damage


def rewritten(name: str, change: Callable[[bytes, random.Random], bytes]) -> Damage:
    """To the file of that name."""

    def damage(root: Path, draw: random.Random) -> str:
        (root / name).write_bytes(change((root / name).read_bytes(), draw))
        return name

    return damage


def done(*arguments: str) -> None:
    ok(CliRunner().invoke(convert, arguments))


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def of_config() -> Work:
    known = configs()
    Path("config.json").touch()
    return Work(rewritten("config.json", lambda _, draw: mutated(draw.choice(known), draw)), [("inspect", "."), ("plan", ".")])


def of_gguf() -> Work:
    write(Path("model.gguf"), model_of("llama"))

    def damage(data: bytes, draw: random.Random) -> bytes:
        return bytes_changed(data, draw.choice((64, 1200, len(data) // 2)), draw)

    return Work(rewritten("model.gguf", damage), [("inspect", "model.gguf")])


def not_loaded(root: Path) -> str | None:
    """Why transformers does not load a result whole."""
    from transformers import AutoModelForCausalLM

    try:
        _, info = AutoModelForCausalLM.from_pretrained(root / "out", output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return next((f"{key}: {sorted(map(str, found))[:2]}" for key, found in info.items() if found), None)


def of_weights() -> Work:
    commands = [
        ("gqa", "source", "out", "--groups", "2", "--no-text", "-q", "--method", method)
        for method in ("mean", "mean", "aligned")
    ]
    return Work(rewritten("source/model.safetensors", weights_changed), commands, not_loaded)


def of_interrupted(command: tuple[str, ...], call: int) -> Work:
    """Of what a run leaves that was stopped; what it ends in are the weights of one that was not."""
    template = Path.cwd().with_name("stopped")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, HealingTrainer, "compute_loss", call, KeyboardInterrupt())
        result = CliRunner().invoke(convert, command)
    assert result.exit_code == Interrupted.exit_code, result.output
    shutil.copytree(Path.cwd(), template)
    done(*command, "--resume")
    expected = [file.read_bytes() for file in sorted(Path("out").glob("*.safetensors"))]
    for path in Path.cwd().iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(template, Path.cwd(), dirs_exist_ok=True)

    def check(root: Path) -> str | None:
        same = [file.read_bytes() for file in sorted((root / "out").glob("*.safetensors"))] == expected
        return None if same else "other weights"

    return Work(any_file(lambda root: files_in(root / "out.partial")), [(*command, "--resume")], check)


def of_sweep() -> Work:
    done(*SWEEP)
    shutil.rmtree("out/report")
    return Work(any_file(lambda root: sorted(root.glob("out/*/*.json"))), [(*SWEEP, "--resume")])


def of_recipe() -> Work:
    done(*MQA)
    return Work(any_file(lambda root: [root / "out" / "conversion.json"]), [("run", "out", "again", "--dry-run")])


def of_state() -> Work:
    done("mqa", "source", "mqa", "--method", "mean", "-q")
    return of_interrupted(HEAL, 5)


def of_provenance() -> Work:
    done("mqa", "source", "mqa", "--method", "mean", "-q")
    return Work(any_file(lambda root: [root / "mqa" / "conversion.json"]), [(*HEAL[:3], *HEAL[5:], "--dry-run")])


KINDS: dict[str, Callable[[], Work]] = {
    "config": of_config, "weights": of_weights, "gguf": of_gguf, "state": of_state,
    "conversion": lambda: of_interrupted(MQA, 3), "sweep": of_sweep, "recipe": of_recipe, "provenance": of_provenance,
}  # fmt: skip


def copies(template: Path, place: Path, count: int) -> Iterator[Path]:
    """Fresh copies of a directory, one after the other at the same place, which is the current directory."""
    for _ in range(count):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template, place, symlinks=True)  # with times, by which a file is known
        os.chdir(place)
        yield place


def main(count: int = 2000, seed: int = 0, kinds: Iterable[str] = KINDS) -> Outcome:
    """Run `count` cases of each kind, the same for the same seed."""
    outcome, before = Outcome(), Path.cwd()
    for kind in kinds:
        draw = random.Random(f"{seed}:{kind}")
        with tempfile.TemporaryDirectory() as directory:
            template, place = Path(directory).resolve() / "template", Path(directory).resolve() / "case"
            place.mkdir()
            os.chdir(place)  # the same place as later: paths are part of what is kept
            try:
                saved(tiny_model(tiny_config("llama", num_hidden_layers=2)), Path("source"))
                Path("text.txt").write_text(TEXT)
                work = KINDS[kind]()
                shutil.copytree(place, template)
                for number, root in enumerate(copies(template, place, count)):
                    case = f"{kind} {number}: {work.damage(root, draw)}"
                    code, wrong = judged(*draw.choice(work.commands))
                    outcome.cases += 1
                    outcome.ended_well += code == 0
                    if wrong := wrong or (work.check(root) if code == 0 else None):
                        outcome.wrong.append(f"{case}: {wrong}")
            finally:
                os.chdir(before)
        print(f"{kind}: {outcome.cases} cases so far, {len(outcome.wrong)} of them wrong", file=sys.stderr, flush=True)
    return outcome


if __name__ == "__main__":
    found = main(*map(int, sys.argv[1:3]), *filter(None, [tuple(sys.argv[3:])]))
    print(found)
    sys.exit(bool(found.wrong))
