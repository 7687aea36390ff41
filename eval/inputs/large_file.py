"""Text files of any size, read as UTF-8: from the start, piece by piece, or in parts from all over them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from attention.errors import Failure
from attention.spread import evenly_spread
from eval.inputs.encoding import PIECE

LARGE = 2**24  # bytes; a smaller file is read as a whole
_EXCERPT = 2**15  # bytes of a part
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, without their whole part, fill the range from 0 to 1 evenly
MARK = "\ufeff"  # before a text, by which some editors tell its encoding


def pieces(path: Path, first: int | None) -> Iterator[str]:
    """The text of a file as it is: line ends stay, and so does a byte order mark.

    Args:
        path: The file.
        first: Characters of the first piece; others have as many as are encoded at a time. None for one piece.

    Raises:
        Failure: The file cannot be read, is not UTF-8 text, or is a pipe or a device with more than a large file's start.
    """
    held, wanted = "", first
    for part in _decoded(path):
        held += part
        while wanted is not None and len(held) > wanted:
            yield held[:wanted]
            held, wanted = held[wanted:], PIECE
    yield held


def _decoded(path: Path) -> Iterator[str]:
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        endless = not path.is_file()
        with path.open("rb") as file:
            while True:
                data = file.read(PIECE)
                pending = len(decoder.getstate()[0])
                try:
                    yield _without_nuls(path, decoder.decode(data, final=not data), before - pending)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, error.reason, before - pending + error.start) from None
                if not data:
                    return
                before += len(data)
                if endless and before > LARGE:
                    said = f"{path} is no regular file, and holds more than {LARGE:,} bytes, or has no end"
                    raise Failure(said, hint="write what is wanted of it into a file: head -c 16M")
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None


def excerpts(path: Path, size: int) -> str:
    """About `size` bytes of a file: whole lines, where they are short, from evenly spread places.

    Not in the file's order: those of any part of the result, from its start, are spread evenly, too.

    Raises:
        Failure: The file cannot be read, or is not UTF-8.
    """
    parts = []
    try:
        whole = path.stat().st_size
        chosen = evenly_spread(max(1, size // _EXCERPT), max(1, whole // _EXCERPT))
        with path.open("rb") as file:
            for _, index in sorted((number * _GOLDEN % 1, index) for number, index in enumerate(chosen)):
                file.seek(index * _EXCERPT)
                parts.append(_lines(path, file.read(_EXCERPT), index * _EXCERPT))
    except OSError as error:
        raise Failure(f"cannot read {path}: {error.strerror}") from None
    return "\n".join(part.removeprefix(MARK) for part in parts)


def _lines(path: Path, data: bytes, offset: int) -> str:
    """The whole lines of a part of a file, or all of it where it has no two line ends."""
    start, end = (data.find(b"\n") + 1 if offset else 0), data.rfind(b"\n")
    if end <= start:
        start, end = next((i for i in range(4) if data[i : i + 1] and data[i] & 0xC0 != 0x80), 0), len(data)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data[start:end])  # leaves out a character that is cut at the end
        return _without_nuls(path, text, offset + start)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error.reason, offset + start + error.start) from None


def _without_nuls(path: Path, text: str, offset: int) -> str:
    """`text` itself. UTF-16 and binary files may pass as UTF-8, and have NULs, which no text has."""
    if (found := text.find("\0")) < 0:
        return text
    raise _not_utf8(path, "a NUL", offset + len(text[:found].encode()))


def _not_utf8(path: Path, reason: str, offset: int) -> Failure:
    return Failure(f"{path} is not UTF-8 text: {reason} at byte {offset}", hint="convert it: iconv -f ENCODING -t UTF-8")
