"""Follows the model that is given to `convert gqa` through the code, by the calls that one conversion makes.

    python scripts/follow.py MODEL

A *stay* is a visit to a function of ours that is given the model: its path, its Source, or a value that holds one (Request,
Plan, Job, …). What such a value says of itself is no visit. Calls of one function by one caller are one stay, however often a
loop repeats them. A *return* is a stay in a module that was left before. The *depth* is the largest number of our functions on
the stack.
"""

import dataclasses
import inspect
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / package}/" for package in ("attention", "eval", "convert"))
_BUILT = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>", "__init__", "__post_init__"}


class Stay(NamedTuple):
    """A visit: the function, its caller, and the depth of the stack."""

    function: str
    caller: str
    depth: int


def followed(model: Path) -> tuple[list[Stay], int]:
    """The stays of one conversion in order, and the largest depth."""
    import convert
    from eval.inputs.source import Source

    stays, seen, deepest = list[Stay](), set[tuple[str, str]](), 0

    def holds(value: Any) -> bool:
        if isinstance(value, Source) or (isinstance(value, str | Path) and Path(value) == model):
            return True
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return False
        return any(isinstance(part, Source) or hasattr(part, "source") for part in vars(value).values())

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS) or code.co_name in _BUILT:
            return
        names = list(stack(frame))
        deepest = max(deepest, len(names))
        arguments = inspect.getargvalues(frame)
        values = [arguments.locals.get(name) for name in arguments.args if name not in ("self", "cls")]
        step = names[0], names[1] if len(names) > 1 else ""
        if step not in seen and any(map(holds, values)):
            seen.add(step)
            stays.append(Stay(*step, len(names)))

    with tempfile.TemporaryDirectory() as directory:
        sys.setprofile(profile)
        try:
            convert.gqa(model, Path(directory) / "out", groups=1, method="mean")
        finally:
            sys.setprofile(None)
    return stays, deepest


def stack(frame: FrameType | None) -> Iterator[str]:
    """Our functions on the stack, the innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(OURS) and code.co_name not in _BUILT:
            yield f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
        frame = frame.f_back


def returns(stays: list[Stay]) -> int:
    """How often a module is entered again after it was left."""
    modules = [stay.function.partition(":")[0] for stay in stays]
    left, count = set[str](), 0
    for before, now in itertools.pairwise(modules):
        if now != before:
            left.add(before)
            count += now in left
    return count


def main() -> None:
    """Print the stays, and how many there are."""
    stays, deepest = followed(Path(sys.argv[1]))
    for stay in stays:
        print(f"{'  ' * stay.depth}{stay.function}")
    functions = len({stay.function for stay in stays})
    print(f"{len(stays)} stays in {functions} functions, {returns(stays)} returns, at most {deepest} functions deep")


if __name__ == "__main__":
    main()
