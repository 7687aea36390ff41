"""Rows of cells as aligned text that is also a Markdown table: readable on a terminal, pasteable into an issue."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A GitHub table with padded cells.

    Args:
        header: One name per column.
        rows: Cells, as many as columns.
        right: Indices of the columns that are aligned right (numbers).
    """
    grid = [list(header), *(list(row) for row in rows)]
    grid = [[cell.replace("|", "\\|") for cell in row] for row in grid]
    widths = [max(3, *(len(row[i]) for row in grid)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
    return "\n".join([line(grid[0]), f"| {' | '.join(rule)} |", *map(line, grid[1:])])
