"""Bounds of a GGUF header, checked before a library reads it: counts that no model has would keep that busy for hours."""

from __future__ import annotations

import struct
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
        self._file, self._size, self._values = file, size, 0

    def header(self) -> None:
        if self._file.read(4) != _MAGIC:
            raise Unsound("it does not begin with GGUF")
        if (version := self._number(4)) not in (2, 3):
            raise Unsound(f"it is of version {version}, or written for machines of another byte order")
        tensors, keys = self._number(8), self._number(8)
        for what, count in (("tensors", tensors), ("keys", keys)):
            if count > _MOST_ENTRIES:
                raise Unsound(f"it has {count} {what}, more than {_MOST_ENTRIES}")
        for _ in range(keys):
            self._skip(self._number(8))
            self._value(self._number(4))
        for _ in range(tensors):
            self._skip(self._number(8))
            if (dimensions := self._number(4)) > _MOST_DIMENSIONS:
                raise Unsound(f"a tensor has {dimensions} dimensions, more than {_MOST_DIMENSIONS}")
            self._skip(8 * dimensions + 4 + 8)  # its sizes, its type and its place

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip(self._number(8))
        elif kind == _ARRAY:
            self._list()
        else:
            self._skip(self._bytes_of(kind))

    def _list(self) -> None:
        kind, count = self._number(4), self._number(8)
        if kind == _ARRAY:
            raise Unsound("it has a list of lists")
        self._values += count
        if self._values > _MOST_VALUES:
            raise Unsound(f"its lists have more than {_MOST_VALUES} values")
        if kind != _STRING:
            self._skip(count * self._bytes_of(kind))
            return
        for _ in range(count):
            self._skip(self._number(8))

    def _bytes_of(self, kind: int) -> int:
        size = _SIZES[kind] if kind < len(_SIZES) else None
        if size is None:
            raise Unsound(f"it has a value of type {kind}, which does not exist")
        return size

    def _number(self, size: int) -> int:
        """The next unsigned integer of 4 or 8 bytes, little-endian."""
        found = self._file.read(size)
        if len(found) < size:
            raise Unsound("its header ends too soon")
        number: int = struct.unpack("<I" if size == 4 else "<Q", found)[0]
        return number

    def _skip(self, size: int) -> None:
        if self._file.tell() + size > self._size:
            raise Unsound("its header ends too soon")
        self._file.seek(size, 1)
