"""Kill conversions at random moments, and hold what is left, and what `--resume` makes of it, against an undisturbed run.

    python tests/fuzz/kills.py [COUNT] [SEED] [COMMAND...]

COUNT times each of `gqa`, `mla --refine`, `sweep`, `heal`, `own` (a conversion whose source writes its text, and which is
healed) and `gguf` (one of a file that is dequantised), or of those that are named, is killed by SIGKILL at a moment drawn
between its start and the time that an undisturbed run takes. Then nothing may be at OUTPUT but a whole result, and the same
command with `--resume` must give the bytes of the undisturbed run, and leave nothing else behind. Runs are forked from a
process that has imported everything, so that the moments fall into the work and not into the imports.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # tests/, for tiny; the repository
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not survive a fork

from gguf_files import model_of, write
from tiny import save_tokenizer, tiny_config, tiny_model

TEXT = "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.\n"
COMMANDS = ("gqa", "mla", "sweep", "heal", "own", "gguf")
CALIBRATION = ("--calibration-tokens", "4096", "--calibration-context", "64")


@dataclass(frozen=True)
class Work:
    """A command and what it makes.

    Attributes:
        name: For messages.
        arguments: Of the command line, with OUTPUT in the place of "OUTPUT".
        results: The checkpoints that it makes, within OUTPUT.
    """

    name: str
    arguments: tuple[str, ...]
    results: tuple[str, ...] = (".",)

    def line(self, output: Path, *more: str) -> list[str]:
        return [str(output) if argument == "OUTPUT" else argument for argument in self.arguments] + [*more, "-q"]


def works(source: Path, text: Path) -> list[Work]:
    """The commands over a tiny checkpoint, cut into many shards so that there are many moments to be killed at."""
    given, shards = ("--text", str(text), *CALIBRATION), ("--max-shard-size", "20KB")
    converted, file = source.with_name("converted"), source.with_name("model.gguf")
    return [
        Work("gqa", ("gqa", str(source), "OUTPUT", "--groups", "2", *given, *shards)),
        Work(
            "mla --refine",
            ("mla", str(source), "OUTPUT", "--kv-lora-rank", "24", "--qk-rope-head-dim", "8", "--refine", "5", *given, *shards),
        ),
        Work(
            "sweep",
            ("sweep", str(source), "OUTPUT", "--groups", "2", "--mla", "24+8", "--methods", "aligned,weighted", *given,
             "--evaluate", str(text), "--max-tokens", "256"),
            ("gqa-2-aligned", "mla-24+8-weighted"),
        ),
        Work("heal", ("heal", str(converted), "OUTPUT", "--text", "self", "--tokens", "4k", "--context", "64", "--lr", "1e-3")),
        Work("own", ("mqa", str(source), "OUTPUT", "--text", "self", "--heal", "1k", *CALIBRATION, *shards)),
        Work("gguf", ("mqa", str(file), "OUTPUT", "--method", "mean")),
    ]  # fmt: skip


def start(line: Sequence[str]) -> int:
    """Run a command line in a forked process, whose id is returned."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        from convert.command.cli import main

        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            code = int(main.main(list(line), prog_name="convert", standalone_mode=False) or 0)
    finally:
        os._exit(code)


def run(line: Sequence[str]) -> int:
    """Run a command line to its end; its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(start(line), 0)[1])


def killed(line: Sequence[str], after: float) -> bool:
    """Run a command line, and kill it after some seconds; whether it was still running then."""
    child = start(line)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def content(directory: Path) -> dict[str, str]:
    """Hashes of every file of a checkpoint; of conversion.json without what differs from run to run."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "conversion.json":
                provenance: dict[str, Any] = json.loads(data)
                del provenance["run"]
                data = json.dumps(provenance).encode()
            found[str(path.relative_to(directory))] = hashlib.sha256(data).hexdigest()
    return found


def wrong(work: Work, output: Path, expected: dict[str, dict[str, str]], after: float) -> list[str]:
    """What a run that is killed, and the one that resumes it, do wrong."""
    was = killed(work.line(output), after)
    found = []
    for result in work.results:
        there = output / result
        if there.exists() and any(there.iterdir()) and content(there) != expected[result]:
            found.append(f"{work.name} killed after {after:.3f} s: {result} is there, and not whole")
    code = run(work.line(output, "--resume"))
    if code:
        found.append(f"{work.name} killed after {after:.3f} s (running: {was}): --resume ended with {code}")
    found += [
        f"{work.name} killed after {after:.3f} s: {result} differs after --resume"
        for result in work.results
        if not code and content(output / result) != expected[result]
    ]
    patterns = ("*.partial", "*.lock", "*.tmp")
    left = [path.name for place in (output.parent, output) for pattern in patterns for path in place.glob(pattern)]
    return found + ([f"{work.name}: {left} is left behind"] if left and not code else [])


def main(count: int = 50, seed: int = 0, commands: Sequence[str] = COMMANDS) -> list[str]:
    """Kill each of some commands `count` times; what went wrong."""
    for name in ("torch", "transformers", "convert.converting", "convert.sweeping"):
        importlib.import_module(name)  # before any fork
    draw, found = random.Random(seed), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        source, text = directory / "source", directory / "text.txt"
        tiny_model(tiny_config("llama", num_key_value_heads=8)).save_pretrained(source)
        save_tokenizer(source)
        text.write_text(TEXT * 60)
        write(directory / "model.gguf", model_of("llama"))
        run(["mqa", str(source), str(directory / "converted"), "--method", "mean", "-q"])
        for work in (work for work in works(source, text) if work.name.split()[0] in commands):
            output = directory / "out"
            began = time.monotonic()
            if code := run(work.line(output)):
                found.append(f"{work.name} undisturbed ended with {code}")
                continue
            took = time.monotonic() - began
            expected = {result: content(output / result) for result in work.results}
            for _ in range(count):
                shutil.rmtree(output)
                found += wrong(work, output, expected, draw.uniform(0, took))
                shutil.rmtree(directory / "out.partial", ignore_errors=True)
            shutil.rmtree(output, ignore_errors=True)
            print(f"{work.name}: {took:.1f} s undisturbed, killed {count} times, {len(found)} problems so far", flush=True)
    return found


if __name__ == "__main__":
    problems = main(*map(int, sys.argv[1:3]), *filter(None, [sys.argv[3:]]))
    print("\n".join(problems) or "nothing went wrong")
    sys.exit(bool(problems))
