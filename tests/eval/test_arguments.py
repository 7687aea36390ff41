"""Arguments of the API: a wrong type is refused by the argument's name before anything is read."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict, Unpack

import numpy as np
import pytest

import convert
from attention.errors import Refusal
from eval import bench, evaluate
from eval.arguments import Option, checked, options_of


@checked
def takes(
    count: int = 1,
    share: float = 0.5,
    flag: bool = False,
    text: str | Path | Sequence[str] | Mapping[str | Path, float] | None = None,
    pair: Sequence[str | tuple[int, int]] | None = None,
    call: Callable[[int], object] = print,
) -> str:
    """What it does."""
    return f"{count} {share} {flag} {text} {pair}"


def test_right_types_pass() -> None:
    given: dict[str, Any]
    for given in (
        {"count": 3, "share": 1, "flag": True, "text": "a", "pair": ["a", (1, 2)]},
        {"count": np.int64(3), "share": np.float32(1), "text": Path("a"), "pair": ()},
        {"text": ["a", "b"]},
        {"text": {"a": 1, Path("b"): 2.5}, "call": len},
    ):
        assert takes(**given).startswith(str(given.get("count", 1)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": "3"}, "count is '3', of type str; it must be int"),
        ({"count": True}, "count is True, of type bool; it must be int"),
        ({"count": 1.0}, "it must be int"),
        ({"share": "x"}, "it must be float"),
        ({"flag": 1}, "it must be bool"),
        ({"text": 5}, r"it must be str \| Path \| Sequence\[str\] \| Mapping\[str \| Path, float\] \| None"),
        ({"text": ["a", 1]}, "text is"),
        ({"text": {"a": "b"}}, "text is"),
        ({"pair": [(1, 2, 3)]}, "pair is"),
        ({"pair": "ab"}, "pair is"),
        ({"call": 3}, "call is 3"),
        ({"text": ""}, "text is empty; it must be a path"),
    ],
)
def test_wrong_types_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        takes(**given)


def test_the_signature_stays_as_it_is_written() -> None:
    assert list(inspect.signature(takes).parameters) == ["count", "share", "flag", "text", "pair", "call"]
    assert takes.__doc__ == "What it does."
    with pytest.raises(TypeError, match="unexpected keyword"):
        takes(**{"other": 1})  # type: ignore[arg-type]


class Size(TypedDict, total=False):
    width: Required[Annotated[int, Option("How wide. See --max-height.", least=1, most=9)]]
    max_height: Annotated[int | str | None, Option("How high MODEL is; repeatable.", unset="as --width", least=2, parse=int)]


class All(Size, total=False):
    mode: Annotated[str, Option("How.", default="plain", choices=("plain", "fancy"), python="For programs.")]
    loud: Annotated[bool, Option("Whether loud.")]
    parts: Annotated[Sequence[str | int] | None, Option("Several.", least=1, parse=int)]
    odd: Annotated[int, Option("Odd.", default=3, least=3)]


@checked
def sized(model: str, **given: Unpack[All]) -> dict[str, Any]:
    """Says what it was given.

    Args:
        model: A model.
        **given: The options.

    Returns:
        These.
    """
    return {"model": model, **given}


def test_options_are_a_signature_and_a_docstring() -> None:
    signature = inspect.signature(sized)
    assert str(signature).startswith(
        "(model: str, *, width: int, max_height: int | str | None = None, mode: str = 'plain', loud"
    )
    assert list(signature.parameters) == ["model", *options_of(All)]
    assert (inspect.getdoc(sized) or "").split("Args:\n")[1] == (
        "    model: A model.\n"
        "    width: How wide. See `max_height`. At least 1 and at most 9.\n"
        "    max_height: How high `model` is. At least 2. By default: as `width`.\n"
        "    mode: How. One of plain, fancy. For programs.\n"
        "    loud: Whether loud.\n"
        "    parts: Several. At least 1.\n"
        "    odd: Odd. At least 3.\n"
        "\n"
        "Returns:\n"
        "    These."
    )


def test_options_have_defaults_and_strings_are_parsed() -> None:
    given = {"width": 2, "max_height": None, "mode": "plain", "loud": False, "parts": None, "odd": 3}
    assert sized("m", width=2) == {"model": "m", **given}
    assert sized(model="m", width=2, max_height="5", parts=["3", 4]) == {
        "model": "m",
        **given,
        "max_height": 5,
        "parts": (3, 4),
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 0}, "width is 0; it must be at least 1 and at most 9"),
        ({"width": 10}, "width is 10; it must be"),
        ({"max_height": "1"}, "max_height is 1; it must be at least 2"),
        ({"max_height": float("nan")}, "max_height is nan, of type float"),
        ({"odd": 2}, "odd is 2; it must be at least 3"),
        ({"loud": "yes"}, "loud is 'yes', of type str; it must be bool"),
    ],
)
def test_options_out_of_range_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        sized("m", **({"width": 1} | given))


def test_every_function_checks() -> None:
    functions = {name: getattr(convert, name) for name in ("gqa", "mqa", "mla", "heal", "sweep", "plan", "inspect")}
    needed: dict[str, dict[str, Any]] = {"gqa": {"groups": 1}, "sweep": {"evaluate": "a"}}
    for name, function in (functions | {"evaluate": evaluate, "bench": bench}).items():
        outputs = [] if name in ("plan", "inspect", "evaluate", "bench") else ["out"]
        with pytest.raises(Refusal, match="trust_remote_code is 'no', of type str"):
            function("model", *outputs, **needed.get(name, {}), trust_remote_code="no")
    with pytest.raises(TypeError, match="missing a required argument: 'width'"):
        sized("m")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'height'"):
        sized("m", width=1, height=2)  # type: ignore[call-arg]
