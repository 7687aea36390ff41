"""The options of commands, made from those of the API. It imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, get_origin

import click

from attention.errors import Refusal
from eval.arguments import Option, options_of, parts
from eval.inputs.text import SELF, TextGiven
from eval.options import Reading

_NUMBERS: Any = ((int, click.INT, click.IntRange), (float, click.FLOAT, click.FloatRange))

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Consented(click.Option):
    """An option that could do harm: only a user may give it, and no conversion.json."""


class Checked(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A value that stays the string that it is, once an option that parses it has not refused it."""

    name = "text"

    def __init__(self, option: Option) -> None:
        self._option = option

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        assert self._option.parse is not None
        try:
            self._option.bound(self._option.parse(str(value)))
        except Refusal as refusal:
            self.fail(str(refusal), param, ctx)
        return str(value)


class TextFile(click.Path):
    """A file, or the word "self", which stays a string."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, str) and value == SELF else super().convert(value, param, ctx)


class Directory(click.Path):
    """A directory that is written. pathlib takes an empty string for the current one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.fail("it is empty: name a directory", param, ctx) if value == "" else super().convert(value, param, ctx)


class Gpu(click.ParamType):  # type: ignore[type-arg]
    """NAME=GB."""

    name = "gpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        name, _, size = str(value).rpartition("=")
        try:
            gigabytes = float(size)
        except ValueError:
            gigabytes = 0.0
        if not name or not 0 < gigabytes < math.inf:
            self.fail(f"{value!r} is not a GPU: give a name and its memory in GB, as in A6000=48", param, ctx)
        return name, gigabytes


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated values of one type."""

    name = "list"

    def __init__(self, each: click.ParamType) -> None:  # type: ignore[type-arg]
        self._each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self._each.convert(item.strip(), param, ctx) for item in str(value).split(","))


model, models = click.argument("model"), click.argument("models", nargs=-1, required=True, metavar="MODEL...")
output = click.argument("output", type=Directory(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_verbosity: tuple[Decorator, ...] = (
    click.option("-v", "--verbose", is_flag=True, help="Show warnings of libraries, and tracebacks of known errors."),
    click.option("-q", "--quiet", is_flag=True, help="Show no progress and no warnings."),
)


def plain(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what a command prints."""
    return _all((_json, *_verbosity), command)


def of(declared: type) -> Decorator:
    """Add the options of a function of the API, and those that say what a command prints."""
    return lambda command: _all(_made(declared), command)


def _made(declared: type) -> Iterator[Decorator]:
    reading = options_of(Reading)
    for name, option in options_of(declared).items():
        if option.flag != "" and name not in reading:
            yield _option(option)
    yield _json
    yield from map(_option, reading.values())
    yield from _verbosity


def _all(decorators: Iterable[Decorator], command: Callable[..., Any]) -> Callable[..., Any]:
    return reduce(lambda decorated, decorate: decorate(decorated), reversed(list(decorators)), command)


def _option(option: Option) -> Decorator:
    """An option of a command."""
    flag, default = option.flag or f"--{option.name.replace('_', '-')}", option.default
    said = option.help + (f"  [default: {option.unset}]" if option.unset else "")
    how: dict[str, Any] = {"cls": Consented if option.consent else None, "help": said}
    if bool in parts(option.type):
        both = default is not False
        how |= {"is_flag": True, "show_default": both and default is not None}
        return click.option(f"{flag}/--no-{flag[2:]}" if both else flag, option.name, default=default, **how)
    how |= {"type": _type(option), "metavar": option.metavar or _metavar(option)}
    if option.several or _mapping(option) or _texts(option):
        return click.option(flag, option.name, multiple=True, callback=_together(option), **how)
    how |= {"required": True} if option.required else {"default": default, "show_default": default is not None}
    return click.option(flag, option.name, **how)


def _metavar(option: Option) -> str | None:
    if option.file or option.directory:
        return "FILE" if option.file else "DIR"
    return ("N,…" if option.several else "N") if int in option.kinds else None


def _together(option: Option) -> Callable[[click.Context, click.Parameter, tuple[Any, ...]], Any]:
    """What makes one value of an option that may be repeated: no value twice, of texts one or several, else the default."""

    def together(ctx: click.Context, param: click.Parameter, value: tuple[Any, ...]) -> Any:
        if option.file:
            texts = tuple(dict.fromkeys(value))
            return texts if len(texts) > 1 else next(iter(texts), None)
        if not value:
            return option.default
        return dict(value) if _mapping(option) else tuple(dict.fromkeys(itertools.chain(*value)))

    return together


def _mapping(option: Option) -> bool:
    return any(get_origin(part) is Mapping for part in parts(option.type))


def _texts(option: Option) -> bool:
    """Whether it may be several texts."""
    return bool(option.type == TextGiven | None)


def _type(option: Option) -> click.ParamType:  # type: ignore[type-arg]
    """The type of a value, or of each where there are several."""
    if option.file:
        return (TextFile if _texts(option) else click.Path)(exists=True, dir_okay=False, path_type=Path)
    if option.directory:
        return Directory(exists=option.directory == "old", file_okay=False, path_type=Path)
    if _mapping(option):
        return Gpu()
    each = _single(option)
    return Listed(each) if option.several else each


def _single(option: Option) -> click.ParamType:  # type: ignore[type-arg]
    if option.choices:
        return click.Choice(option.choices)
    if option.parse:
        return Checked(option)
    for kind, unbounded, between in _NUMBERS:
        if kind in option.kinds:
            return unbounded if option.least is None else between(option.least, option.most)
    return click.STRING
