"""Damage what one run leaves for another, run that, and count what must never happen.

    python tests/fuzz/left_behind.py [COUNT] [SEED] [KIND...]

COUNT times each, or for the kinds that are named, a file is damaged (bits flipped, its end cut off, JSON or tensors edited,
another file in its place, or none):

- state: of the work directory of a healing that was stopped; `heal --resume` follows
- conversion: of the work directory of a conversion that was stopped; `mqa --resume` follows
- sweep: of the results of a sweep; `sweep --resume` follows
- gguf: the header of a GGUF file; `inspect` follows
- recipe: conversion.json; `run --dry-run` follows
- provenance: conversion.json; `heal --dry-run` follows

A command may refuse in one line. It may not end in a traceback, take longer than 20 seconds, or end well with other weights
than without the damage.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # tests/, for tiny; the repository
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from click.testing import CliRunner
from fuzz import configs, weight_files
from gguf_files import model_of, write
from tiny import save_tokenizer, tiny_config, tiny_model

from attention.errors import Interrupted

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n" * 40
CALIBRATION = ("--calibration-tokens", "512", "--calibration-context", "32", "--device", "cpu", "-q")
MEASURED = ("--max-tokens", "256", "--device", "cpu", "-q")
HEALING = ("--tokens", "384", "--context", "32", "--batch-tokens", "64", "--lr", "3e-3", "--device", "cpu", "-q")


@dataclass
class Outcome:
    """What came of all cases; `wrong` names cases by kind, number, file, damage and what went wrong."""

    cases: int = 0
    ended_well: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.cases} cases, {self.ended_well} ended well, {len(self.wrong)} wrong", *self.wrong])


@dataclass(frozen=True)
class Work:
    """One kind of damage.

    Attributes:
        template: A directory with everything that the command needs.
        files: Which files of it may be damaged.
        command: What follows the damage, within a copy of the template.
        made: The result, within it, whose weights must be those of a run without damage; None if nothing is made.
    """

    template: Path
    files: Callable[[Path], list[Path]]
    command: tuple[str, ...]
    made: str | None = None


# ---- damage --------------------------------------------------------------------------------------------------------


def damage(file: Path, others: Sequence[Path], draw: random.Random) -> str:
    """Damage a file; what was done."""
    data = file.read_bytes()
    kind = draw.choice(("flipped", "cut", "edited", "edited", "edited", "replaced", "removed", "emptied"))
    if kind == "removed":
        file.unlink()
    elif kind == "emptied":
        file.write_bytes(b"")
    elif kind == "replaced":
        file.write_bytes(draw.choice(others).read_bytes())
    elif kind == "flipped" and data:
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 3, 20))):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        file.write_bytes(bytes(changed))
    elif kind == "cut" or not data:
        file.write_bytes(data[: draw.randrange(len(data) + 1)] + draw.choice((b"", b"\0" * 40)))
    elif file.suffix == ".json":
        file.write_bytes(configs.mutated(json.loads(data), draw))
    elif file.suffix == ".safetensors":
        name, content = weight_files.damaged(draw, data)
        file.write_bytes(content)
        return name
    else:
        start = draw.randrange(len(data))
        file.write_bytes(data[:start] + draw.randbytes(draw.choice((1, 8, 100))) + data[start + draw.choice((0, 1, 8)) :])
    return kind


def damage_header(file: Path, draw: random.Random) -> str:
    """Damage a GGUF file within its header, most often in a count, a length or a type."""
    changed = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        start = draw.choice((draw.randrange(64), draw.randrange(1200), draw.randrange(len(changed) // 2)))
        how = draw.randrange(4)
        if how == 0:
            changed[start] ^= 1 << draw.randrange(8)
        elif how == 1:
            width = draw.choice((1, 4, 8))
            value = draw.choice((0, 1, 8, 9, 13, 2**7, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)) % 2 ** (8 * width)
            changed[start : start + width] = value.to_bytes(width, "little")
        elif how == 2:
            del changed[start : start + draw.choice((1, 8, 100))]
        else:
            changed[start:start] = draw.randbytes(draw.choice((1, 4, 8)))
    file.write_bytes(bytes(changed) if draw.random() < 0.9 else bytes(changed[: draw.randrange(len(changed))]))
    return "header"


# ---- what is damaged -----------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    """A command, in this process."""
    from convert.command.cli import main as command

    return CliRunner().invoke(command, list(arguments))


def done(*arguments: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 0, result.output


def stopped(function: str, call: int, *arguments: str) -> None:
    """Run a command that is interrupted at a call of a function."""
    owner, name = function.rsplit(".", 1)
    original, calls = getattr(__import__("pkgutil").resolve_name(owner), name), [0]

    def stopping(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise KeyboardInterrupt
        return original(*given, **named)

    with mock.patch(function, stopping):
        result = run(*arguments)
    assert result.exit_code == Interrupted.exit_code, result.output


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def prepared(kind: str, root: Path) -> Work:
    """What a kind of damage needs, in the current directory; `root` is where it will lie."""
    tiny_model(tiny_config("llama", num_hidden_layers=2)).save_pretrained("source")
    save_tokenizer(Path("source"))
    Path("text.txt").write_text(TEXT)
    heal = ("heal", "mqa", "out", "--teacher", "source", "--text", "text.txt", *HEALING)
    mqa = ("mqa", "source", "out", "--text", "text.txt", "--text", "self", "--heal", "256", *CALIBRATION)
    sweep = ("sweep", "source", "out", "--groups", "2,1", "--methods", "mean", "--no-text", "--evaluate", "text.txt", *MEASURED)
    if kind in ("state", "provenance"):
        done("mqa", "source", "mqa", "--method", "mean", "-q")
    if kind in ("state", "conversion"):
        command, call = (heal, 5) if kind == "state" else (mqa, 3)
        stopped("convert.healing.trainer.HealingTrainer.compute_loss", call, *command)
        return Work(root, lambda at: files_in(at / "out.partial"), (*command, "--resume"), "out")
    if kind == "sweep":
        done(*sweep)
        shutil.rmtree("out/report")
        return Work(root, lambda at: sorted(at.glob("out/*/*.json")), (*sweep, "--resume"))
    if kind == "recipe":
        done(*mqa)
        return Work(root, lambda at: [at / "out" / "conversion.json"], ("run", "out", "again", "--dry-run"))
    if kind == "provenance":
        return Work(root, lambda at: [at / "mqa" / "conversion.json"], (*heal[:3], *heal[5:], "--dry-run"))
    assert kind == "gguf"
    write(Path("model.gguf"), model_of("llama"))
    return Work(root, lambda at: [at / "model.gguf"], ("inspect", "model.gguf"))


KINDS = ("state", "conversion", "sweep", "gguf", "recipe", "provenance")


# ---- runs ----------------------------------------------------------------------------------------------------------


def weights(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}


def copies(template: Path, place: Path, count: int) -> Iterator[Path]:
    """Fresh copies of a directory, one after the other at the same place, which is the current directory."""
    for _ in range(count):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(template, place, symlinks=True)  # with times, by which a file is known
        os.chdir(place)
        yield place


def one(work: Work, kind: str, count: int, seed: int, place: Path, outcome: Outcome) -> None:
    """All cases of one kind."""
    draw, expected = random.Random(f"{seed}:{kind}"), None
    if work.made:
        next(copies(work.template, place, 1))
        done(*work.command)
        expected = weights(place / work.made)
    for number, root in enumerate(copies(work.template, place, count)):
        files = work.files(root)
        file = draw.choice(files)
        how = damage_header(file, draw) if kind == "gguf" else damage(file, files, draw)
        case = f"{kind} {number}: {file.relative_to(root)} {how}"
        outcome.cases += 1
        try:
            with weight_files.limited(weight_files.SECONDS):
                result = run(*work.command)
        except weight_files.TooLongError:
            outcome.wrong.append(f"{case}: no end within {weight_files.SECONDS} seconds")
            continue
        said = [line for line in result.stderr.splitlines() if line.lower().startswith("error: ")]
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            outcome.wrong.append(f"{case}: traceback at {configs.raised_at(result.exception)}")
        elif (result.exit_code and len(said) != 1) or not result.stderr.replace("\n", "").isprintable():
            outcome.wrong.append(f"{case}: not one line, or no text: {result.exit_code} {result.stderr[-400:]!r}")
        if result.exit_code == 0:
            outcome.ended_well += 1
            if work.made and weights(root / work.made) != expected:
                outcome.wrong.append(f"{case}: other weights")


def main(count: int = 2000, seed: int = 0, kinds: Sequence[str] = KINDS) -> Outcome:
    """Run `count` cases of each kind, the same for the same seed."""
    outcome, before = Outcome(), Path.cwd()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as directory:
            template, place = Path(directory).resolve() / "template", Path(directory).resolve() / "case"
            place.mkdir()
            os.chdir(place)  # the same place as later: paths are part of what is kept
            try:
                work = prepared(kind, template)
                shutil.copytree(place, template)
                one(work, kind, count, seed, place, outcome)
            finally:
                os.chdir(before)
        print(f"{kind}: {outcome.cases} cases so far, {len(outcome.wrong)} of them wrong", file=sys.stderr, flush=True)
    return outcome


if __name__ == "__main__":
    found = main(*map(int, sys.argv[1:3]), *filter(None, [tuple(sys.argv[3:])]))
    print(found)
    sys.exit(bool(found.wrong))
