"""Progress of long work: one callback, which is called for each stage."""

import contextlib
import math
from collections.abc import Callable, Iterator

# Called as (stage, done, total, unit): first with done = 0, last with done = total.
Progress = Callable[[str, int, int, str], object]


def silent(stage: str, done: int, total: int, unit: str) -> None:
    """Ignores progress."""


@contextlib.contextmanager
def stage(progress: Progress, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Report one stage of the work during the block.

    Args:
        progress: The callback.
        name: A verb for the stage: "survey".
        total: The number of units.
        unit: The unit in the singular: "layer", "token", "byte".

    Yields:
        A function to call with the number of units newly done.
    """
    count = 0
    progress(name, 0, total, unit)

    def advance(further: int) -> None:
        nonlocal count
        count += further
        progress(name, count, total, unit)

    yield advance


def duration(seconds: float) -> str:
    """With two digits, for people: "12 minutes"."""
    units = (("second", 1, 100), ("minute", 60, 100), ("hour", 3600, 48), ("day", 86400, math.inf))
    unit, size = next((unit, size) for unit, size, most in units if seconds / size < most)
    count = max(1.0, seconds / size)
    digits = 0 if count >= 9.5 else 1
    rounded = round(count, digits)
    return f"{rounded:g} {unit}{'' if rounded == 1 else 's'}"
