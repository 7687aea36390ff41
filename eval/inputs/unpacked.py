"""Checkpoints that MODELs of other forms became, in the user's cache, so that each is unpacked once."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from attention.errors import Failure
from eval.inputs.sealed import give_name, seal, sync_tree, unsealed

_log = logging.getLogger("kvfold")
_FORMAT = 3  # of an entry
_LOCK, _UNFINISHED = "lock", "unfinished"  # beside the entries
_ENTRY, _CHECKPOINT = "entry.json", "checkpoint"  # in an entry


class Packed(Protocol):
    """What becomes a checkpoint."""

    @property
    def note(self) -> str:
        """What to know of the checkpoint, for plans and cards."""

    def unpack(self, directory: Path) -> None:
        """Write the checkpoint into an empty directory. Raises `OSError` if the disk is full."""


@dataclass(frozen=True)
class Unpacked:
    """A checkpoint, and what it was made from.

    Attributes:
        file: The file or directory that it was made from.
        directory: Where the checkpoint is.
        note: What to know of it, for plans and cards.
    """

    file: Path
    directory: Path
    note: str

    @property
    def nbytes(self) -> int:
        """Of the checkpoint, on disk; of links, not what they lead to."""
        return sum(path.lstat().st_size for path in self.directory.glob("*"))

    def as_dict(self) -> dict[str, Any]:
        return {"file": str(self.file), "directory": str(self.directory), "bytes": self.nbytes, "note": self.note}


def unpacked(path: Path, files: Iterable[Path], opened: Callable[[], Packed], identity: str = "") -> Unpacked:
    """The checkpoint that something became; the first call makes it.

    Args:
        path: The file or directory that it is made from.
        files: All files that it is made from: if one of them changes, it is made again.
        opened: Reads what says how it is made, and refuses what cannot be.
        identity: What else the checkpoint depends on.

    Raises:
        Refusal: As `opened`.
        Failure: A file cannot be read, or the checkpoint cannot be written; or as `opened`.
    """
    import transformers

    parts = [str(path.resolve()), str(_FORMAT), transformers.__version__, identity]
    for file in files:
        try:
            found = file.stat()
            with file.open("rb"):
                pass
        except OSError as error:
            raise Failure(f"cannot read {file}: {error}") from None
        parts.append(f"{file.name} {found.st_size} {found.st_mtime_ns}")
    directory = _cache() / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    if (known := _whole(directory)) is not None:
        return known
    packed = opened()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _alone(directory.parent):
            if _whole(directory) is None:  # another run was not faster
                _make(path, packed, directory)
    except OSError as error:
        raise Failure(
            f"cannot unpack {path} into {directory}: {error}",
            hint="is the disk full? XDG_CACHE_HOME may name a directory on another one",
        ) from None
    if (made := _whole(directory)) is None:
        raise Failure(f"{directory} was removed while it was in use", hint="repeat the command")
    return made


def entries() -> list[Unpacked]:
    """Whole entries of the cache, by the names of what they were made from."""
    found = (_whole(directory) for directory in _directories())
    return sorted((entry for entry in found if entry is not None), key=lambda entry: str(entry.file))


def clear() -> int:
    """Remove everything from the cache; the bytes that it had.

    Raises:
        Failure: It cannot be removed.
    """
    try:
        if not _cache().is_dir():
            return 0
        with _alone(_cache()):
            removed = sum(file.lstat().st_size for file in _cache().rglob("*") if not file.is_dir())
            for directory in _directories():
                shutil.rmtree(directory)
    except OSError as error:
        raise Failure(f"cannot clear {_cache()}: {error}") from None
    return removed


def _make(path: Path, packed: Packed, directory: Path) -> None:
    """Make an entry, then remove what earlier files of its name became."""
    unfinished, file = directory.parent / _UNFINISHED, path.absolute()
    if unfinished.exists():  # of a run that was killed
        shutil.rmtree(unfinished)
    (unfinished / _CHECKPOINT).mkdir(parents=True)
    try:
        packed.unpack(unfinished / _CHECKPOINT)
        files = _files(unfinished / _CHECKPOINT)
        seal(unfinished / _ENTRY, {"file": str(file), "note": packed.note, "files": files})
        sync_tree(unfinished)
        for other in _directories():
            known = unsealed(other / _ENTRY) or {}
            if other == directory or (other != unfinished and known.get("file") == str(file)):
                shutil.rmtree(other)
        give_name(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _log.warning(
        "%s is unpacked into %s (%.2f GB), where later commands find it; `convert cache clear` removes it",
        path, directory, Unpacked(file, directory / _CHECKPOINT, packed.note).nbytes / 1e9,
    )  # fmt: skip


def _whole(directory: Path) -> Unpacked | None:
    """An entry; None if it is not there, or files of it are missing or were written since."""
    found = unsealed(directory / _ENTRY)
    if found is None or found["files"] != _files(directory / _CHECKPOINT):
        return None
    return Unpacked(Path(found["file"]), directory / _CHECKPOINT, found["note"])


def _files(directory: Path) -> dict[str, list[int]]:
    """The files of a directory, with their bytes and the times at which they were written."""
    if not directory.is_dir():
        return {}
    found = {path.name: path.stat() for path in sorted(directory.iterdir()) if path.exists()}  # a link's target may be gone
    return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Hold the cache for one run at a time; the system lets the next one in where a run was killed."""
    lock = FileLock(cache / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.warning("waiting for another run, which unpacks a model into %s", cache)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _directories() -> Iterator[Path]:
    """The directories of entries, whole or not, and of one that is not finished."""
    return (path for path in sorted(_cache().glob("*")) if path.is_dir())


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kvfold" / "unpacked"
