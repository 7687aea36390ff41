"""The command that a conversion.json records, as arguments of the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from attention.errors import Refusal
from convert.command.parameters import Consented
from eval.inputs.sealed import read_object
from eval.inputs.text import OWN_TEXT, SELF

_COMMANDS = ("gqa", "mqa", "mla", "heal")  # those that write a conversion.json
_MODEL = ("model", "converted")  # their first argument
_TEXTS = ("text", "dataset", "no_text", "strings")


def arguments(result: Path, output: Path, given: Sequence[str], group: click.Group) -> list[str]:
    """The command that repeats a result elsewhere: its name, its options, and what it reads and writes.

    Args:
        result: The directory of the result, or its conversion.json.
        output: Where the new result goes.
        given: More options of the same command. They override the recorded ones; texts replace all recorded texts.
        group: The click group with the commands.

    Raises:
        Refusal: There is no such record, it names what the command does not take, or what only a user may allow.
    """
    if str(output).startswith("--"):
        raise Refusal(f"OUTPUT is missing before {output}", hint="give `convert run RESULT OUTPUT`, and options after these")
    file = result / "conversion.json" if result.is_dir() else result
    name, recorded = _recipe(file)
    flags = {one.partition("=")[0] for one in given}
    if flags & {"--text", "--dataset", "--no-text"}:
        recorded = {key: value for key, value in recorded.items() if key not in _TEXTS}
    if "strings" in recorded:  # of the Python API
        raise Refusal(
            f"{file} records {recorded['strings']} strings as its text, and does not hold them",
            hint="write them to a file, one after another, and add --text FILE",
        )
    if (own := file.parent / OWN_TEXT).is_file() and "text" in recorded:
        recorded["text"] = _with_own(recorded["text"], str(own))
    parameters = {max(one.opts, key=len).lstrip("-").replace("-", "_"): one for one in group.commands[name].params}
    options, model = list[str](), list[str]()
    for key, value in recorded.items():
        if key not in parameters or key == "output":
            raise Refusal(f"{file} records {key!r}, and `convert {name}` has no such option")
        words = _words(parameters[key], value)
        if words is None:
            raise Refusal(f"{file} records a wrong value of {key!r}, of type {type(value).__name__}")
        if isinstance(parameters[key], Consented) and words and words[0].partition("=")[0] not in flags:
            raise Refusal(f"{file} asks for {words[0]}: only the command line may allow that", hint=f"add {words[0]}")
        (model if key in _MODEL else options).extend(words)
    return [name, *options, *given, "--", *model, str(output)]


def _recipe(file: Path) -> tuple[str, dict[str, Any]]:
    recipe = (read_object(file) or {}).get("recipe")
    if isinstance(recipe, dict) and len(recipe) == 1:
        ((name, options),) = recipe.items()
        if name in _COMMANDS and isinstance(options, dict):
            return name, dict(options)
    raise Refusal(f"{file} records no conversion: `convert run` takes a result's conversion.json")


def _with_own(text: Any, file: str) -> Any:
    """Texts, with the file of what the model wrote in place of the word for it."""
    return [_with_own(one, file) for one in text] if isinstance(text, list) else file if text == SELF else text


def _words(parameter: click.Parameter, value: Any) -> list[str] | None:
    """A parameter on the command line; None for what is not a value of it."""
    flag = max(parameter.opts, key=len)
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return None if not isinstance(value, bool) else [flag] if value else parameter.secondary_opts[:1]
    values = value if isinstance(value, list) and getattr(parameter, "multiple", False) else [value]
    if not all(isinstance(one, str | int | float) and not isinstance(one, bool) and "\0" not in str(one) for one in values):
        return None
    return [str(one) if isinstance(parameter, click.Argument) else f"{flag}={one}" for one in values]
