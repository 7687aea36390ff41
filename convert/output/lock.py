"""Allows one run per OUTPUT, by a file lock beside it, which the system releases when its process dies.

The lock file is `OUTPUT.lock`. While it is held, a line in it names the holder, for messages alone. Its holder removes it;
a lock on a file that is no longer there does not count.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from attention.errors import Failure

_MARK = "kvfold: "  # the start of the line
_LONGEST = 1000  # characters of the line that are read


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
