"""Types of the API's arguments: a wrong one is refused by its name, where it would otherwise fail far inside."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from attention.errors import Refusal

P = ParamSpec("P")
R = TypeVar("R")
_NUMBERS = {int: numbers.Integral, float: numbers.Real}  # also numpy's


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which refuses arguments that are not of the types that its signature gives."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            hint = _hint(str(signature.parameters[name].annotation), function)
            if not _fits(value, hint):
                raise Refusal(f"{name} is {value!r:.80}, of type {type(value).__name__}; it must be {_named(hint)}")
        return function(*args, **kwargs)

    return checking


def _hint(written: str, function: Callable[..., Any]) -> Any:
    """The type that an annotation means; Any if it names one that only type checkers import."""
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": written}), function.__globals__)["it"]
    except NameError:
        return Any


def _named(hint: Any) -> str:
    """A type, for people."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("pathlib.", "").replace("collections.abc.", "")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if hint is Any or origin is typing.Literal:  # wrong words are refused where they are used
        return True
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, parts[0]) and _fits(v, parts[1]) for k, v in value.items())
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_fits, value, parts))
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(_fits(v, parts[0]) for v in value)
    if hint is Path:
        return isinstance(value, os.PathLike)
    if origin is Callable or getattr(hint, "_is_protocol", False):
        return callable(value)
    return isinstance(value, hint)
