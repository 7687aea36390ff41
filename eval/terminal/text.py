"""How text is written for people: to a terminal, into Markdown and its tables, and into a shell command.

Names of models, files and directories may hold anything: line breaks, terminal escapes, characters that turn the direction
of text, Markdown and HTML.
"""

import re
import shlex
import unicodedata
from collections.abc import Sequence

# What opens or closes markup, wherever it stands; `_`, `#` and `&` only where they can.
_MARKUP = re.compile(r"[\\`*\[\]<>|~$]|(?<![^\W_])_|_(?![^\W_])|(?<!\S)#|&(?=#?\w+;)")


def printable(text: str) -> str:
    """`text` in one line, with a space for each line break, control character, bidi control and half of a surrogate pair."""
    return "".join(c if c.isprintable() else " " for c in text)


def printable_lines(text: str) -> str:
    """The same for text of several lines, whose line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def markdown(text: str) -> str:
    """`text` as one line of Markdown, or a cell of its tables, that shows it as it is."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", printable(text))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format a GitHub table with padded cells, which is aligned text for terminals as well.

    Args:
        header: One name per column.
        rows: Cells, as many as columns; any text, shown as it is.
        right: Indices of the columns that are aligned right (numbers).
    """
    grid = [[markdown(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(_width(row[i]) for row in grid)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = []
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            gap = " " * (width - _width(cell))
            padded.append(gap + cell if i in right else cell + gap)
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - 1) + (":" if i in right else "-") for i, w in enumerate(widths)]
    return "\n".join([line(grid[0]), f"| {' | '.join(rule)} |", *map(line, grid[1:])])


def _width(text: str) -> int:
    """The width in terminal columns: East Asian wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def bytes_text(count: float) -> str:
    """A number of bytes with three digits in a suitable unit: 768 B, 12.3 kB, 42.9 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def shell_line(words: list[str]) -> str:
    r"""A command that a shell reads back as `words`, in one printable line.

    What is not printable is written as bash, zsh and ksh read it, byte by byte: `$'two\x0alines'`.
    """
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_ansi_c, word))}'" for word in words)


def _ansi_c(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    if character.isprintable():
        return character
    # A byte of a path that is not UTF-8 comes as half of a surrogate pair.
    errors = "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", errors))
