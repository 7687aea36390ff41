"""Arguments of the API, which are the options of the commands: what an option is declared as, and what follows from it.

A `TypedDict` has entries `name: Annotated[type, Option(help, …)]`. A function takes them as `**given: Unpack[ThatDict]`, and
`checked` makes its signature, its docstring, defaults and refusals of them.
"""

import functools
import inspect
import math
import numbers
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from attention.errors import Refusal

P = ParamSpec("P")
R = TypeVar("R")
_NUMBERS = {int: numbers.Integral, float: numbers.Real}  # also numpy's
_WIDTH, _INDENT = 128, " " * 8  # of docstrings
_REST = re.compile(r"^ *\*\*given: .*\n", re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """An argument of the API, and an option of its command.

    Attributes:
        help: What it is for, as on the command line: with --other-option, and with MODEL for the argument `model`.
        default: Its value where it is not given; False for a bool. None if it is `Required`.
        unset: What such a default stands for, for people.
        python: What only programs need to know.
        choices: The words that it may be. Others are refused where they are used.
        least: The smallest number that it may be. Several numbers are refused where they are used.
        most: The largest one, where there is a smallest.
        parse: The value of a string; it raises `Refusal`.
        file: Whether it names a file, which has to exist.
        directory: Whether it names a directory, which is "old" and has to exist, or "new" and is written.
        metavar: A word for the value; None for N, FILE or DIR, as its type says.
        flag: Its name on the command line; None for its own name, "" for what only programs can give.
        consent: Whether it could do harm, so that no conversion.json may give it by itself.
        name: Its own name, and
        type: its type, of the entry that declares it.
        required: Whether it has to be given.
    """

    help: str
    default: Any = None
    unset: str = ""
    python: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    parse: Callable[[str], Any] | None = None
    file: bool = False
    directory: Literal["", "old", "new"] = ""
    metavar: str | None = None
    flag: str | None = None
    consent: bool = False
    name: str = ""
    type: Any = None
    required: bool = False

    @property
    def kinds(self) -> list[Any]:
        """The types of which it may be, and of each where it may be several."""
        return [
            kind
            for part in parts(self.type)
            for kind in (part, *(each for inner in typing.get_args(part) for each in parts(inner)))
        ]

    @property
    def several(self) -> bool:
        """Whether it may be several values in a sequence."""
        return not self.file and any(typing.get_origin(part) is Sequence for part in parts(self.type))

    def value(self, given: Any) -> Any:
        """A value of the right type as the function takes it: strings are parsed, and several values are each there once.

        Raises:
            Refusal: It is no such string, or a number out of range.
        """
        each = given if self.several and isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        parsed = tuple(self.parse(one) if self.parse and isinstance(one, str) else one for one in each)
        if self.several:
            return None if given is None else tuple(dict.fromkeys(parsed))
        self.bound(parsed[0])
        return parsed[0]

    def bound(self, number: Any) -> None:
        """Raise `Refusal` if a number is out of range."""
        least, most = self.least, math.inf if self.most is None else self.most
        if least is not None and isinstance(number, numbers.Real) and not least <= float(number) <= most:
            and_most = f" and at most {most}" if most < math.inf else ""
            raise Refusal(f"{self.name} is {number}; it must be at least {least}{and_most}")

    def described(self, arguments: Sequence[str]) -> str:
        """What it is for, as programs spell it; `arguments` are the others of the function."""
        bounds = [f"at {word} {bound}" for word, bound in (("least", self.least), ("most", self.most)) if bound is not None]
        said = [
            self.help.replace("; repeatable", ""),
            f"One of {', '.join(self.choices)}." if self.choices else "",
            f"{' and '.join(bounds).capitalize()}." if bounds else "",
            f"By default: {self.unset}." if self.unset else "",
            "A file, or a list of strings." if self.file else "",
        ]
        text = re.sub(r"--([a-z][a-z-]*)", lambda flag: f"`{flag[1].replace('-', '_')}`", " ".join(filter(None, said)))
        for argument in arguments:
            text = re.sub(rf"\b{argument.upper()}\b", f"`{argument}`", text)
        return f"{text} {self.python}".rstrip()


@functools.cache
def options_of(declared: type) -> dict[str, Option]:
    """The options that a `TypedDict` declares, in order. A type variable, by which overloads differ, means its bound."""
    found = dict[str, Option]()
    for name, hint in typing.get_type_hints(declared, include_extras=True).items():
        required = typing.get_origin(hint) is typing.Required
        kind, option = typing.get_args(typing.get_args(hint)[0] if required else hint)
        kind = kind.__bound__ if isinstance(kind, TypeVar) else kind
        default = False if kind is bool and option.default is None else option.default
        found[name] = replace(option, name=name, type=kind, required=required, default=default)
    return found


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which refuses arguments that its signature does not allow, and gets a value for each of its options."""
    signature, options = _expanded(function)

    @functools.wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            hint = signature.parameters[name].annotation
            if not _fits(value, hint):
                raise Refusal(f"{name} is {value!r:.80}, of type {type(value).__name__}; it must be {_named(hint)}")
            if value == "" and Path in parts(hint):  # pathlib takes it for the current directory
                raise Refusal(f"{name} is empty; it must be a path")
        bound.apply_defaults()
        values = {name: option.value(bound.arguments[name]) for name, option in options.items()}
        return function(*bound.args, **(bound.kwargs | values))

    named = [name for name in signature.parameters if name not in options]
    wrapper = textwrap.TextWrapper(_WIDTH, _INDENT, f"{_INDENT}    ", break_on_hyphens=False)
    lines = [wrapper.fill(f"{name}: {option.described(named)}") for name, option in options.items()]
    checking.__doc__ = _REST.sub(lambda _: "".join(f"{line}\n" for line in lines), function.__doc__ or "")
    checking.__signature__ = signature  # type: ignore[attr-defined]
    return checking


def parse_count(text: str) -> int:
    """Parse a number of tokens: 20M, 1.5B, 300k, 4096.

    Raises:
        Refusal: It is not a number above 0.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kMB]?)\s*", text, re.IGNORECASE | re.ASCII)
    count = round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2].upper()]) if match else 0
    if count < 1:
        raise Refusal(f"invalid number of tokens {text!r}: give one above 0, as in 300k, 20M or 4096")
    return count


def _expanded(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Option]]:
    """A function's signature with its options in the place of `**given`, and these."""
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    found, options = list[inspect.Parameter](), dict[str, Option]()
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            found.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        (declared,) = typing.get_args(hints[parameter.name])
        options = options_of(typing.get_origin(declared) or declared)
        for name, option in options.items():
            default = parameter.empty if option.required else option.default
            found.append(inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=option.type))
    return signature.replace(parameters=found), options


def parts(hint: Any) -> tuple[Any, ...]:
    """The types of which a value has to be one."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("pathlib.", "").replace("collections.abc.", "")


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if len(parts(hint)) > 1:
        return any(_fits(value, part) for part in parts(hint))
    if hint is Any or origin is typing.Literal:  # wrong words are refused where they are used
        return True
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(k, arguments[0]) and _fits(v, arguments[1]) for k, v in value.items())
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(_fits(v, arguments[0]) for v in value)
    if hint is Path:
        return isinstance(value, os.PathLike)
    if origin is Callable or getattr(hint, "_is_protocol", False):
        return callable(value)
    return isinstance(value, hint)
