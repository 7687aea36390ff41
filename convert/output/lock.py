"""Allows one run per OUTPUT, by a file lock beside it, which the system releases when its process dies.

The lock file is `OUTPUT.lock`. Its holder removes it; a lock on a file that is no longer there does not count. While it is
held, one line of JSON in it names the holder. That line is only for messages; the system keeps the lock.
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

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from attention.errors import Failure

_MARK = b'{"kvfold"'  # the start of the line
_LONGEST = 4096  # bytes of the line that are read
_NAMED_WITHIN = 0.5  # seconds in which a new holder must write its line
_TRIES = 20  # if the holder has just removed the file


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
    path = lock_path(output)
    descriptors: list[int] = []

    def sign(descriptor: int) -> None:
        try:
            _write(descriptor, _line())
        except OSError:
            path.unlink()  # the lock is held
            raise
        descriptors.append(descriptor)

    # A soft lock would outlive a killed run. preserve_lock_file: it is removed below.
    with _one_line(output, path):
        if issubclass(FileLock, SoftFileLock):
            raise NotImplementedError("this system has no file locks")
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_ours(path)
        lock = FileLock(path, blocking=False, fallback_to_soft=False, preserve_lock_file=True, on_acquired=sign)
        _acquire(lock, output, path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptors[0], 0)  # if it cannot be removed, later messages do not name this run
            if os.path.samestat(os.fstat(descriptors[0]), path.stat()):
                path.unlink()
        lock.release()


def _acquire(lock: BaseFileLock, output: Path, path: Path) -> None:
    """Get the lock, or say who has it. filelock does not take a file that has been removed or replaced."""
    for _ in range(_TRIES):
        try:
            lock.acquire()
            return
        except Timeout:
            if path.exists():
                raise Failure(
                    f"another run is writing {output}: {_named(path)}",
                    hint="wait until it has ended, or choose another OUTPUT",
                ) from None
    raise OSError(errno.ENOENT, "no file can be made there")


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
    """Fail if the file exists and no run of kvfold made it."""
    try:
        with path.open("rb") as file:
            found = file.read(_LONGEST).strip(b"\0 \n")  # a power failure may leave zeros
    except FileNotFoundError:
        return
    if found and not found.startswith(_MARK):
        raise Failure(f"{path} is in the way, and no conversion made it", hint="move it, or choose another OUTPUT")


def _line() -> bytes:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"kvfold": 1, "pid": os.getpid(), "machine": platform.node(), "began": began, "command": command[:500]}
    return json.dumps(holder).encode() + b"\n"


def _write(descriptor: int, line: bytes) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, line)
    os.ftruncate(descriptor, len(line))


@dataclass(frozen=True)
class _Holder:
    pid: int
    machine: str
    began: str
    command: str

    @classmethod
    def read(cls, path: Path) -> _Holder | None:
        """The holder that the file names; None if it names none or cannot be read."""
        try:
            with path.open("rb") as file:
                found = json.loads(file.read(_LONGEST))
            pid, *texts = (found[key] for key in ("pid", "machine", "began", "command"))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return cls(pid, *texts) if type(pid) is int and all(isinstance(text, str) for text in texts) else None

    @property
    def is_gone(self) -> bool:
        """Whether it is a process of this machine that has ended, so that the line is out of date."""
        if self.machine != platform.node() or self.pid <= 0:
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # another user's
            return False
        return False

    def __str__(self) -> str:
        here = self.machine == platform.node() and self.pid == os.getpid()
        who = "this process" if here else f"process {self.pid} on {self.machine}"
        command = f" ({self.command})" if self.command else ""
        return f"{who}, since {self.began}{command}"


def _named(path: Path) -> str:
    """The holder of the lock, in words. Waits briefly for a new holder to write its line."""
    until = time.monotonic() + _NAMED_WITHIN
    while ((holder := _Holder.read(path)) is None or holder.is_gone) and time.monotonic() < until:
        time.sleep(0.02)
    return str(holder) if holder else f"{path} is locked, and does not say by whom"
