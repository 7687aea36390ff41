"""Files that one run leaves for another: they come back as they were written, or they do not count.

Each holds the SHA-256 of what it says, and has its name only once it is on disk. So a flipped bit, a file that was cut, and
one that something else wrote are all noticed.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from attention.errors import Failure

Content = tuple[dict[str, torch.Tensor], dict[str, Any]]


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, or None if there is none: no file, a damaged one, or other JSON."""
    try:
        # Reading a pipe would wait for ever.
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def seal(path: Path, noted: Mapping[str, Any]) -> None:
    """Write a JSON object together with its checksum."""
    write_whole(path, json.dumps({"sha256": _hash(noted), "noted": dict(noted)}, indent=1).encode())


def unsealed(path: Path) -> dict[str, Any] | None:
    """The object that `seal` wrote, or None if the file is not there or not as it was written."""
    found = read_object(path) or {}
    noted = found.get("noted")
    return noted if isinstance(noted, dict) and found.get("sha256") == _hash(noted) else None


def _hash(noted: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(noted, sort_keys=True).encode()).hexdigest()


def seal_tensors(path: Path, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
    """Write tensors and a JSON note as one safetensors file, with a checksum of both in its header."""
    tensors, text = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, json.dumps(dict(note))
    # `save_file` would hide a full disk behind its own error.
    # One metadata entry, because safetensors writes several in no fixed order.
    noted = json.dumps({"sha256": _checksum(tensors, text), "note": text})
    write_whole(path, save(tensors, {"noted": noted}))


def unsealed_tensors(path: Path, known: bool = False) -> Content | None:
    """The tensors that `seal_tensors` wrote, or None if the file is not there or not as it was written.

    Args:
        path: The file.
        known: Whether this run has written or checked it already, so that its checksum need not be computed.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
            noted = json.loads(file.metadata()["noted"])
        text = noted["note"]
        if not known and noted["sha256"] != _checksum(tensors, text):
            return None
        return tensors, dict(json.loads(text))
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, RuntimeError):
        return None


class Shelf:
    """One file of tensors per layer, complete or absent: one that has changed since it was written does not count.

    Args:
        directory: The directory of the files.
        name: The start of their names.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._whole: set[int] = set()  # layers that this object has written or checked

    def _path(self, layer: int) -> Path:
        return self._directory / f"{self._name}-{layer:05d}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether the layer's file exists and is undamaged."""
        if not self._path(layer).is_file():
            self._whole.discard(layer)
        elif layer not in self._whole and unsealed_tensors(self._path(layer)) is not None:
            self._whole.add(layer)
        return layer in self._whole

    def put(self, layer: int, tensors: Mapping[str, torch.Tensor], note: Mapping[str, Any]) -> None:
        """Write a layer's tensors and a JSON note."""
        seal_tensors(self._path(layer), tensors, note)
        self._whole.add(layer)

    def get(self, layer: int) -> Content:
        """The tensors and the note of a layer.

        Raises:
            Failure: The file is damaged or missing.
        """
        found = unsealed_tensors(self._path(layer), known=layer in self._whole)
        if found is None:
            raise Failure(
                f"{self._path(layer)} is damaged, or was removed while it was in use",
                hint="the same command with --resume makes it again",
            )
        return found


def _checksum(tensors: Mapping[str, torch.Tensor], note: str) -> str:
    """SHA-256 of everything that `unsealed_tensors` returns, in hexadecimal."""
    digest = hashlib.sha256(note.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unchanged(directory: Path, files: Mapping[str, str]) -> bool:
    """Whether files of a directory are there, with these checksums by their names."""
    return all((directory / name).is_file() and checksum(directory / name) == of for name, of in files.items())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it exists either completely or not at all, even after a power failure."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    give_name(temporary, path)


def give_name(temporary: Path, path: Path) -> None:
    """Rename a file or a directory that is on disk, and wait until its new name is, too."""
    temporary.replace(path)
    sync_directory(path.parent)


def sync_tree(directory: Path) -> None:
    """Wait until everything in a directory is on disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            sync_file(path)
        elif path.is_dir():
            sync_directory(path)
    sync_directory(directory)


def sync_file(path: Path) -> None:
    """Wait until what a file holds is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk, on file systems that support it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except PermissionError:  # Windows cannot open directories
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
