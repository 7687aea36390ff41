"""The destination of an output: where it may be written, by one run at a time, and what is there already; conversion.json.

A checkpoint grows in a work directory beside OUTPUT, `OUTPUT.partial`, and is renamed to OUTPUT when it is complete.

The lock file beside OUTPUT is `OUTPUT.lock`; the system releases the lock when its process dies. While it is held, a line in
the file names the holder, for messages alone. Its holder removes it; a lock on a file that is no longer there does not count.
"""

import contextlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock, Timeout

from attention.errors import Failure, Refusal
from eval.inputs.sealed import read_object
from eval.inputs.text import SELF

INPUTS, CHECKPOINT = "inputs.json", "checkpoint"  # in the work directory
_PROVENANCE = "conversion.json"  # in OUTPUT
_MARK = "kvfold: "  # the start of a lock file's line
_LONGEST = 1000  # characters of the line that are read


@dataclass(frozen=True)
class Output:
    """Where and how to write the result.

    Attributes:
        path: OUTPUT.
        dtype: The dtype that floats are stored in; None keeps each tensor's own.
        max_shard_size: Bytes per weight file.
        overwrite: Whether a checkpoint at `path` may be replaced.
        resume: Whether to continue an unfinished conversion to `path`.
        engine: The engine of `convert.hosts.engines` that has to run it; None for none in particular.
    """

    path: Path
    dtype: str | None = None
    max_shard_size: int = 5 * 10**9
    overwrite: bool = False
    resume: bool = False
    engine: str | None = None


def partial_path(output: Path) -> Path:
    """The work directory of OUTPUT, beside it."""
    whole = output.resolve()  # "." has no name
    return whole.with_name(whole.name + ".partial")


def check_output(given: Output, source: Path | None) -> None:
    """Refuse an OUTPUT that may not be written.

    Args:
        given: As the user gave it. To resume, a finished conversion at OUTPUT passes, too: `Work` finds out which one it is.
        source: The source's directory, if it is local.
    """
    output, overwrite, resume = given.path, given.overwrite, given.resume
    _require_destination(output)
    partial = partial_path(output)
    for ours in (output.resolve(), partial.resolve()) if source else ():
        whole = source.resolve() if source else ours
        if whole == ours or whole in ours.parents or ours in whole.parents:
            raise Refusal(f"OUTPUT {output} and MODEL {source} lie inside each other", hint="choose an OUTPUT beside MODEL")
    if output.is_dir() and any(output.iterdir()):
        if not (overwrite or (resume and not (partial / CHECKPOINT).exists())):
            raise Refusal(f"OUTPUT {output} exists already", hint="choose another, or replace it with --overwrite")
        if not {"kvfold", "recipe"} <= read_provenance(output).keys():
            raise Refusal(
                f"OUTPUT {output} has no conversion.json of kvfold, so --overwrite leaves it alone",
                hint="choose another OUTPUT",
            )
    if partial.exists() or partial.is_symlink():
        if not _is_ours(partial):
            raise Refusal(f"{partial} is in the way, and no conversion made it", hint="move it, or choose another OUTPUT")
        if not (resume or overwrite):
            raise Refusal(
                f"{partial} holds an unfinished conversion", hint="finish it with --resume, or start again with --overwrite"
            )


def _require_destination(output: Path) -> None:
    """Refuse an OUTPUT where no directory can be renamed to: it has to be nothing yet, or a directory."""
    if output.is_symlink():
        raise Refusal(f"OUTPUT {output} is a link to {output.readlink()}", hint="give the directory that it is to be itself")
    if output.exists() and not output.is_dir():
        raise Refusal(f"OUTPUT {output} is not a directory", hint="give a directory that does not exist yet")
    if above := next((parent for parent in output.parents if parent.exists() and not parent.is_dir()), None):
        raise Refusal(
            f"OUTPUT {output} lies in {above}, which is not a directory", hint="give a directory that does not exist yet"
        )
    if os.path.ismount(output):
        raise Refusal(f"OUTPUT {output} is a mount point, which cannot be renamed", hint="give a directory inside it")
    whole = str(output)
    if not output.resolve().name or whole.encode(errors="ignore").decode() != whole:  # safetensors needs valid Unicode
        raise Refusal(f"OUTPUT {whole!r} is not a name for a directory", hint="choose another")


def _is_ours(partial: Path) -> bool:
    """Whether kvfold made this directory: it holds its inputs, which are written first, or nothing yet."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    there = {path.name for path in partial.iterdir()}
    return INPUTS in there or there <= {f"{INPUTS}.tmp"}


def lock_path(output: Path) -> Path:
    """The lock file beside OUTPUT, or beside its target if OUTPUT is a link."""
    whole = output.resolve()
    return whole.with_name(whole.name + ".lock")


@contextlib.contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Hold the lock of OUTPUT, a file or a directory, during the block.

    It does not wait, and fails even if this process already holds the lock. Parents of OUTPUT are created.

    Args:
        output: The file or directory that will be written.

    Raises:
        Failure: Another run holds it, or the lock file cannot be created or locked, or is not kvfold's.
    """
    path, held = lock_path(output), list[int]()

    def sign(descriptor: int) -> None:
        held.append(descriptor)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[:500] if sys.argv else ""
        holder = f"process {os.getpid()} on {platform.node()}, since {since}{command and f' ({command})'}"
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{_MARK}{holder}\n".encode())

    # A soft lock would outlive a killed run. preserve_lock_file: it is removed below.
    try:
        if issubclass(FileLock, SoftFileLock):
            raise OSError("this system has no file locks")
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_ours(path)
        lock = FileLock(path, blocking=False, fallback_to_soft=False, preserve_lock_file=True, on_acquired=sign)
        lock.acquire()
    except (OSError, NotImplementedError) as error:  # a Timeout is an OSError; old filelocks raise the other
        if isinstance(error, Timeout) and path.exists():
            hint = "wait until it has ended, or choose another OUTPUT"
            raise Failure(f"another run is writing {output}: {_named(path)}", hint=hint) from None
        if held:
            path.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Failure(
            f"cannot lock {output}: {path}: " + ("no file can be made there" if isinstance(error, Timeout) else reason),
            hint="kvfold writes only where it can hold a file lock; choose an OUTPUT in another directory or on another disk",
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held[0]), path.stat()):
                path.unlink()
        lock.release()


def _require_ours(path: Path) -> None:
    """Fail if the file exists and no run of kvfold made it."""
    with contextlib.suppress(FileNotFoundError):
        found = _read(path).strip("\0 \n")  # a power failure may leave zeros
        if found and not found.startswith(_MARK):
            raise Failure(f"{path} is in the way, and no conversion made it", hint="move it, or choose another OUTPUT")


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_LONGEST)


def _named(path: Path) -> str:
    """The holder of the lock, in words."""
    line = ""
    with contextlib.suppress(OSError):
        line = _read(path).partition("\n")[0]
    return line.removeprefix(_MARK) if line.startswith(_MARK) else f"{path} is locked, and does not say by whom"


def without_text(options: Mapping[str, Any]) -> dict[str, Any]:
    """A command's options without its texts, which hashes of tokens identify wherever they lie; what is its own stays so."""
    given = options.get("text")
    own = SELF in (given if isinstance(given, list) else [given])
    plain = {name: value for name, value in options.items() if name not in ("text", "strings")}
    return plain | ({"text": SELF} if own else {})


def read_provenance(output: Path) -> dict[str, Any]:
    """conversion.json of an OUTPUT, empty if there is none that can be read."""
    return read_object(output / _PROVENANCE) or {}


def write_provenance(path: Path, provenance: Mapping[str, Any]) -> None:
    """Write conversion.json into a checkpoint's directory."""
    (path / _PROVENANCE).write_text(json.dumps(provenance, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """The versions of this package and of those whose arithmetic affects the result."""
    return {name: version(name) for name in ("kvfold", "torch", "transformers", "safetensors")}
