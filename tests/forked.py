"""Runs scripts in processes of their own without the cost of imports: forked from a server that has imported everything.

Pytest's own process has threads, so that its forks might hang.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([
    "convert.cli", "convert.execute.run", "convert.sweeping", "eval.evaluation", "transformers.models.llama.modeling_llama",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
])  # fmt: skip


class Done(NamedTuple):
    """How a process ended, as in `subprocess.CompletedProcess`."""

    returncode: int | None
    stdout: str
    stderr: str


def run_forked(script: str, *arguments: object) -> Done:
    """What `python -c SCRIPT ARGUMENTS` does."""
    with tempfile.TemporaryDirectory() as directory:
        said = [Path(directory, name) for name in ("stdout", "stderr")]
        process = _context.Process(target=_main, args=(script, [str(argument) for argument in arguments], said))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            process.join()
        return Done(process.exitcode, *(path.read_text() for path in said))


def _main(script: str, arguments: list[str], said: list[Path]) -> None:
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has the jobs in its background ignore it
    sys.argv = ["-c", *arguments]
    exec(script, {"__name__": "__main__"})
