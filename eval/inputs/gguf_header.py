"""Bounds of a GGUF header, checked before a library reads it: counts that no model has would keep that busy for hours."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_SIZES = (1, 1, 2, 2, 4, 4, 4, 1, None, None, 8, 8, 8)  # bytes of a value of each type; strings and arrays say theirs
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 2**16  # keys, or tensors
_MOST_VALUES = 2**21  # of all lists together; a vocabulary of 262,144 tokens takes 1.3 million
_MOST_DIMENSIONS = 4


class Unsound(ValueError):
    """A header that no writer of GGUF files makes."""


def require_sound(path: Path) -> None:
    """Walk over a header.

    Raises:
        Unsound: It runs beyond the end of the file, or says something that no model needs.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        _Walk(file, path.stat().st_size).header()


class _Walk:
    """A walk over a header.

    Args:
        file: Open at its beginning.
        size: Of the file, in bytes.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def header(self) -> None:
        if self._file.read(4) != _MAGIC:
            raise Unsound("it does not begin with GGUF")
        if (version := self._number(4)) not in (2, 3):
            raise Unsound(f"it is of version {version}, or written for machines of another byte order")
        tensors, keys = self._number(8), self._number(8)
        for what, count in (("tensors", tensors), ("keys", keys)):
            if count > _MOST_ENTRIES:
                raise Unsound(f"it has {count} {what}, more than {_MOST_ENTRIES}")
        listed = 0
        for _ in range(keys):
            self._values(_STRING, 1)
            kind, count = self._number(4), 1
            if kind == _ARRAY:
                kind, count = self._number(4), self._number(8)
                listed += count
            if kind == _ARRAY:
                raise Unsound("it has a list of lists")
            if listed > _MOST_VALUES:
                raise Unsound(f"its lists have more than {_MOST_VALUES} values")
            self._values(kind, count)
        for _ in range(tensors):
            self._values(_STRING, 1)
            if (dimensions := self._number(4)) > _MOST_DIMENSIONS:
                raise Unsound(f"a tensor has {dimensions} dimensions, more than {_MOST_DIMENSIONS}")
            self._skip(8 * dimensions + 4 + 8)  # its sizes, its type and its place

    def _values(self, kind: int, count: int) -> None:
        """So many values of a type."""
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number(8))
            return
        size = _SIZES[kind] if kind < len(_SIZES) else None
        if size is None:
            raise Unsound(f"it has a value of type {kind}, which does not exist")
        self._skip(count * size)

    def _number(self, size: int) -> int:
        """The next unsigned integer of so many bytes, little-endian."""
        found = self._file.read(size)
        if len(found) < size:
            raise Unsound("its header ends too soon")
        return int.from_bytes(found, "little")

    def _skip(self, size: int) -> None:
        if self._file.tell() + size > self._size:
            raise Unsound("its header ends too soon")
        self._file.seek(size, 1)
