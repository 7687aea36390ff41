"""One run per OUTPUT: a file lock beside it, which the system releases when the process that holds it dies.

The lock file is `OUTPUT.lock`. It is never removed: removing a locked file lets two runs lock two files of one name. While
it is held it says in one line of JSON who holds it. That line is only for messages; the lock itself is the system's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from attention.errors import Failure

_MARK = b'{"kvfold"'  # what the line begins with
_LONGEST = 4096  # bytes of it that are read
_NAMED_WITHIN = 0.5  # seconds that a holder has to write its name, once it has the lock


def lock_path(output: Path) -> Path:
    """The lock file of OUTPUT, beside it; of a link's target if OUTPUT is a link."""
    whole = output.resolve()
    return whole.with_name(whole.name + ".lock")


@contextlib.contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Hold the lock of OUTPUT, a file or a directory, for as long as the block lasts.

    Taken at once or not at all, also where this very process holds it already. Parents of OUTPUT are made.

    Args:
        output: What will be written, or the directory that it will be written into.

    Raises:
        Failure: Another run holds it; or the lock file cannot be made or locked, or is somebody else's.
    """
    path = lock_path(output)
    descriptors: list[int] = []

    def sign(descriptor: int) -> None:
        _write(descriptor, _line())
        descriptors.append(descriptor)

    # A soft lock would outlive a killed run. preserve_lock_file: as the module says.
    with _one_line(output, path):
        if issubclass(FileLock, SoftFileLock):
            raise NotImplementedError("this system has no file locks")
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_ours(path)
        lock = FileLock(path, blocking=False, fallback_to_soft=False, preserve_lock_file=True, on_acquired=sign)
        try:
            lock.acquire()
        except Timeout:
            if not path.exists():  # to filelock it is just being removed
                raise OSError(errno.ENOENT, "no file can be made there") from None
            raise Failure(
                f"another run is writing {output}: {_named(path)}", hint="wait until it has ended, or choose another OUTPUT"
            ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptors[0], 0)  # whoever fails to get the lock next shall not be told of this run
        lock.release()


@contextlib.contextmanager
def _one_line(output: Path, path: Path) -> Iterator[None]:
    """Turn errors of the file system into a Failure."""
    try:
        yield
    except (OSError, NotImplementedError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Failure(
            f"cannot lock {output}: {path}: {reason}",
            hint="kvfold writes only where it can hold a file lock; choose an OUTPUT in another directory or on another disk",
        ) from None


def _require_ours(path: Path) -> None:
    """Leave a file alone that no run has made."""
    try:
        with path.open("rb") as file:
            found = file.read(_LONGEST).strip(b"\0 \n")  # zeros may be what a power failure leaves
    except FileNotFoundError:
        return
    if found and not found.startswith(_MARK):
        raise Failure(f"{path} is in the way, and no conversion made it", hint="move it, or choose another OUTPUT")


def _line() -> bytes:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"kvfold": 1, "pid": os.getpid(), "host": platform.node(), "began": began, "command": command[:500]}
    return json.dumps(holder).encode() + b"\n"


def _write(descriptor: int, line: bytes) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, line)
    os.ftruncate(descriptor, len(line))


@dataclass(frozen=True)
class _Holder:
    pid: int
    host: str
    began: str
    command: str

    @classmethod
    def read(cls, path: Path) -> _Holder | None:
        """Who the file names; None if it names nobody, or cannot be read."""
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_LONGEST))
            pid, *texts = (found[key] for key in ("pid", "host", "began", "command"))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return cls(pid, *texts) if type(pid) is int and all(isinstance(text, str) for text in texts) else None

    @property
    def is_gone(self) -> bool:
        """Whether it was a process of this machine that has ended; its line is an earlier holder's then."""
        if self.host != platform.node() or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # another user's
            return False
        return False

    def __str__(self) -> str:
        here = self.host == platform.node() and self.pid == os.getpid()
        who = "this process" if here else f"process {self.pid} on {self.host}"
        command = f" ({self.command})" if self.command else ""
        return f"{who}, since {self.began}{command}"


def _named(path: Path) -> str:
    """Who holds the lock. One that has only just got it is given the time to write its name."""
    until = time.monotonic() + _NAMED_WITHIN
    while ((holder := _Holder.read(path)) is None or holder.is_gone) and time.monotonic() < until:
        time.sleep(0.02)
    return str(holder) if holder else f"{path} is locked, and does not say by whom"
