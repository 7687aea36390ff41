"""How long work says how far it is: one callback, called for each stage of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

# (stage, done, total, unit): first with 0 done, last with all of it.
Progress = Callable[[str, int, int, str], object]


def silent(stage: str, done: int, total: int, unit: str) -> None:
    """Says nothing."""


@contextlib.contextmanager
def stage(progress: Progress, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """One stage of the work, for as long as the block lasts.

    Args:
        progress: Who is told.
        name: What is done, a verb: "survey".
        total: How many units there are.
        unit: What is counted, in the singular: "layer", "token", "byte".

    Yields:
        A function to be called with the number of further units that are done.
    """
    count = 0
    progress(name, 0, total, unit)

    def advance(further: int) -> None:
        nonlocal count
        count += further
        progress(name, count, total, unit)

    yield advance
