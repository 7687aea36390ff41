"""Arguments of the API: a wrong type is refused by the argument's name before anything is read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from attention.errors import Refusal
from eval import evaluate
from eval.inputs.arguments import checked


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


@pytest.mark.parametrize(
    "given",
    [
        {"count": 3, "share": 1, "flag": True, "text": "a", "pair": ["a", (1, 2)]},
        {"count": np.int64(3), "share": np.float32(1), "text": Path("a"), "pair": ()},
        {"text": ["a", "b"]},
        {"text": {"a": 1, Path("b"): 2.5}, "call": len},
    ],
)
def test_right_types_pass(given: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("name", ["gqa", "mqa", "mla", "heal", "sweep", "plan", "inspect"])
def test_every_function_checks(name: str) -> None:
    needed: dict[str, Any] = {"gqa": {"groups": 1}, "sweep": {"evaluate": "a"}}.get(name, {})
    with pytest.raises(Refusal, match="trust_remote_code is 'no', of type str"):
        getattr(convert, name)("model", *([] if name in ("plan", "inspect") else ["out"]), **needed, trust_remote_code="no")


def test_evaluation_checks() -> None:
    with pytest.raises(Refusal, match="max_tokens is '3'"):
        evaluate("model", text="a", max_tokens="3")  # type: ignore[arg-type]
