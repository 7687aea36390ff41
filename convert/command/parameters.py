"""The options of commands, made from those of the API. It imports nothing heavy, so that `--help` is fast."""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_origin

import click

from attention.errors import Refusal
from eval.arguments import Option, options_of, parts
from eval.inputs.text import SELF, TextGiven
from eval.options import Reading

_NUMBERS: Any = ((int, click.INT, click.IntRange), (float, click.FLOAT, click.FloatRange))


class Consented(click.Option):
    """An option that could do harm: only a user may give it, and no conversion.json."""


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Parse a string with a function, and report its refusal as a usage error."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(str(value))
        except Refusal as refusal:
            self.fail(str(refusal), param, ctx)


class TextFile(click.Path):
    """A file, or the word "self", which stays a string."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, str) and value == SELF else super().convert(value, param, ctx)


class Directory(click.Path):
    """A directory that is written. pathlib takes an empty string for the current one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.fail("it is empty: name a directory", param, ctx) if value == "" else super().convert(value, param, ctx)


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated values of one type."""

    name = "list"

    def __init__(self, each: click.ParamType) -> None:  # type: ignore[type-arg]
        self._each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(self._each.convert(item.strip(), param, ctx) for item in str(value).split(","))


MODEL, CONVERTED = click.Argument(["model"]), click.Argument(["converted"])
MODELS = click.Argument(["models"], nargs=-1, required=True, metavar="MODEL...")
OUTPUT = click.Argument(["output"], type=Directory(path_type=Path))
DIR = click.Argument(["output"], type=Directory(path_type=Path), metavar="DIR")
DEMO = click.Option(
    ["--output"],
    type=Directory(file_okay=False, path_type=Path),
    default="kvfold-demo",
    show_default=True,
    help="Directory for the results and the report.",
)
_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON.")
_VERBOSITY = (
    click.Option(["-v", "--verbose"], is_flag=True, help="Show warnings of libraries, and tracebacks of known errors."),
    click.Option(["-q", "--quiet"], is_flag=True, help="Show no progress and no warnings."),
)


def parameters(declared: type | None, *own: click.Parameter) -> list[click.Parameter]:
    """List a command's parameters: its own, the options of its API function, and the options for printing."""
    if declared is None:
        return [*own, _JSON, *_VERBOSITY]
    reading = options_of(Reading)
    shown = [option for name, option in options_of(declared).items() if option.flag != "" and name not in reading]
    return [*own, *map(_option, shown), _JSON, *map(_option, reading.values()), *_VERBOSITY]


def _option(option: Option) -> click.Option:
    """An option of a command."""
    flag, default = option.flag or f"--{option.name.replace('_', '-')}", option.default
    said = option.help + (f"  [default: {option.unset}]" if option.unset else "")
    make = partial(Consented if option.consent else click.Option, help=said)
    if bool in parts(option.type):
        both = default is not False
        shown = both and default is not None
        return make(
            [f"{flag}/--no-{flag[2:]}" if both else flag, option.name], default=default, is_flag=True, show_default=shown
        )
    make = partial(make, [flag, option.name], type=_type(option), metavar=option.metavar or _metavar(option))
    if option.several or _mapping(option) or _texts(option):
        return make(multiple=True, callback=partial(_together, option))
    return make(required=True) if option.required else make(default=default, show_default=default is not None)


def _metavar(option: Option) -> str | None:
    if option.file or option.directory:
        return "FILE" if option.file else "DIR"
    return ("N,…" if option.several else "N") if int in option.kinds else None


def _together(option: Option, ctx: click.Context, param: click.Parameter, value: tuple[Any, ...]) -> Any:
    """Join the values of a repeatable option: each value once, a single text alone, the default for none."""
    if option.file:
        texts = tuple(dict.fromkeys(value))
        return texts if len(texts) > 1 else next(iter(texts), None)
    if not value:
        return option.default
    return dict(value) if _mapping(option) else tuple(dict.fromkeys(itertools.chain(*value)))


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
        return Parsed(_gpu)
    each: click.ParamType = click.STRING  # type: ignore[type-arg]
    if option.choices:
        each = click.Choice(option.choices)
    elif option.parse:
        each = Parsed(partial(_checked, option))
    else:
        for kind, unbounded, between in _NUMBERS:
            if kind in option.kinds:
                each = unbounded if option.least is None else between(option.least, option.most)
                break
    return Listed(each) if option.several else each


def _checked(option: Option, text: str) -> str:
    """Return the string unchanged, once its option has parsed it without a refusal."""
    assert option.parse is not None
    option.bound(option.parse(text))
    return text


def _gpu(text: str) -> tuple[str, float]:
    """Parse NAME=GB."""
    name, _, size = text.rpartition("=")
    try:
        gigabytes = float(size)
    except ValueError:
        gigabytes = 0.0
    if not name or not 0 < gigabytes < math.inf:
        raise Refusal(f"{text!r} is not a GPU: give a name and its memory in GB, as in A6000=48")
    return name, gigabytes
