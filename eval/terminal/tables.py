"""Formats rows as aligned text that is also a Markdown table, for terminals and issues."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from eval.terminal.escapes import markdown


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format a GitHub table with padded cells.

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
