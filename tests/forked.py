"""Runs scripts in processes of their own without the cost of imports: forked from a server that has imported all but kvfold.

Pytest's own process has threads, so that its forks might hang.
"""

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([
    "accelerate", "transformers.models.llama.modeling_llama", "transformers.models.deepseek_v3.modeling_deepseek_v3",
])  # fmt: skip
_SECONDS = 300

_WITHOUT_KVFOLD = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("convert", "attention", "eval"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
try:
    import convert
except ImportError:
    pass
else:
    raise SystemExit("convert can be imported")
"""


class Done(NamedTuple):
    """How a process ended, as in `subprocess.CompletedProcess`."""

    returncode: int | None
    stdout: str
    stderr: str


def run_forked(script: str, *arguments: object) -> Done:
    """What `python -c SCRIPT ARGUMENTS` does."""
    return _run(script, arguments, [{}])


def run_file(script: Path, *arguments: object) -> Done:
    """What `python SCRIPT ARGUMENTS` does."""
    return _run(_file(script), arguments, [{}])


def run_without_kvfold(script: str, *arguments: object) -> Done:
    """The same on a machine where kvfold is not installed."""
    return _run(_WITHOUT_KVFOLD + script, arguments, [{}])


def run_team(script: Path, *arguments: object, **environment: str) -> Done:
    """What `torchrun --nproc-per-node 2 SCRIPT ARGUMENTS` does: when one process fails, the other is ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    team = [environment | shared | {"LOCAL_WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    return _run(_file(script), arguments, team)


def _file(script: Path) -> str:
    return (
        f"import runpy, sys; sys.path.insert(0, {str(script.parent)!r}); runpy.run_path({str(script)!r}, run_name='__main__')"
    )


def _run(script: str, arguments: tuple[object, ...], environments: list[dict[str, str]]) -> Done:
    with tempfile.TemporaryDirectory() as directory:
        said = [Path(directory, name) for name in ("stdout", "stderr")]
        given = script, [str(argument) for argument in arguments], said
        processes = [_context.Process(target=_main, args=(*given, environment)) for environment in environments]
        for process in processes:
            process.start()
        running = set(processes)
        while running:
            ended = wait([process.sentinel for process in running], _SECONDS)
            running = {process for process in running if process.sentinel not in ended}
            if not ended or any(process.exitcode for process in processes):
                for process in running:
                    process.kill()
        for process in processes:
            process.join()
        code = next((process.exitcode for process in processes if process.exitcode), 0)
        return Done(code, *(path.read_text() for path in said))


def _main(script: str, arguments: list[str], said: list[Path], environment: dict[str, str]) -> None:
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has the jobs in its background ignore it
    os.environ |= environment
    # This process has the path of pytest's, where a test that ran remote code has left the place of its modules.
    sys.path[:] = [place for place in sys.path if not Path(place, "transformers_modules").is_dir()]
    sys.argv = ["-c", *arguments]
    exec(script, {"__name__": "__main__"})
