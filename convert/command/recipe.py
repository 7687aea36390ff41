"""Recipes: turns commands and options from a YAML file or a conversion.json into command lines.

A recipe is `{command: {option: value, …}}`, or a list of such steps. Keys are option names, with _ or -.
"""

from __future__ import annotations

import copy
import datetime
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from attention.errors import Refusal
from convert.command.parameters import Consented
from eval.inputs.text import OWN_TEXT, SELF
from eval.terminal.escapes import printable

_LONGEST = 4096  # entries of one mapping: what `<<` of aliases of aliases would multiply
_LONGEST_INTEGER = 64  # bits
_FORM = "gqa: {model: …, output: …, groups: 8}"
_QUOTE = "put quotes around a word that YAML takes for something else"

# They replace or delete what is there: results of `demo`, code.
_NEVER = ("run", "demo", "refresh")

Step = tuple[str, dict[str, Any]]


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, and with a limit on what aliases may grow to."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.YAMLError(f"key {key.value!r} is given twice, in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _LONGEST:
            raise yaml.YAMLError(f"its aliases make a mapping of more than {_LONGEST} keys")


def read(path: Path) -> list[Step]:
    """The steps of a recipe file.

    Raises:
        Refusal: The file is not a recipe.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = yaml.load(text, _Loader)
    except OSError:
        raise
    except Exception as error:  # its constructors raise whatever Python does: KeyError for `!!bool perhaps`
        raise Refusal(f"{path} is not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if isinstance(data, dict) and "recipe" in data and "kvfold" in data:  # a conversion.json
        data = _with_own_text(data["recipe"], path.parent / OWN_TEXT)
    steps = data if isinstance(data, list) and data else [data]
    return [_step(path, number, step) for number, step in enumerate(steps, 1)]


def _with_own_text(recipe: Any, file: Path) -> Any:
    """The recipe of a conversion.json, which takes what the model wrote for it from beside it, where that is."""
    if not file.is_file() or not isinstance(recipe, dict):
        return recipe

    def taken(text: Any) -> Any:
        return [taken(one) for one in text] if isinstance(text, list) else str(file) if text == SELF else text

    return {
        command: given | {"text": taken(given["text"])} if isinstance(given, dict) and "text" in given else given
        for command, given in recipe.items()
    }


def _step(path: Path, number: int, step: Any) -> Step:
    if not (isinstance(step, dict) and len(step) == 1 and isinstance(next(iter(step.values())), dict | None)):
        raise Refusal(f"{path} is not a recipe: step {number} is not one command with its options", hint=_FORM)
    ((name, given),) = step.items()
    for key in (name, *(given or {})):
        if not isinstance(key, str):
            raise Refusal(
                f"{path} is not a recipe: step {number} has a key of type {type(key).__name__}", hint="put it into quotes"
            )
    options: dict[str, Any] = {}
    for key, value in (given or {}).items():
        if (plain := key.replace("-", "_")) in options:
            raise Refusal(f"step {number} of {path} gives {key!r} twice")
        options[plain] = value
    return name, options


def command_lines(
    steps: Sequence[Step], settings: Sequence[str], group: click.Group, any_paths: bool = False
) -> list[list[str]]:
    """Arguments of each step, after overriding; every step is parsed before the first may run.

    Args:
        steps: From `read`.
        settings: "KEY=VALUE", applied to every step that has the option.
        group: The click group with the commands.
        any_paths: Whether the recipe may write outside the current directory.

    Raises:
        Refusal: A command or an option does not exist, an argument is missing, or a value is none that the option takes. Or the
            recipe asks for what only the command line may allow.
    """
    overrides = dict(_split(setting) for setting in settings)
    parameters = [_parameters(name, group) for name, _ in steps]
    for key in overrides:
        if not any(key in known for known in parameters):
            raise Refusal(f"--set {key}: no step of this recipe has that option")
    lines, asked = list[list[str]](), dict[str, None]()
    for number, ((name, given), known) in enumerate(zip(steps, parameters, strict=True), 1):
        if "strings" in given and "strings" not in known:  # a conversion.json of the Python API
            if "text" not in overrides:
                raise Refusal(
                    f"step {number} ({name}) was calibrated on {given['strings']} strings, which its record does not hold",
                    hint="write them to a file, one after another, and give it by --set text=FILE",
                )
            given = {key: value for key, value in given.items() if key != "strings"}
        if unknown := sorted(set(given) - set(known)):
            raise Refusal(f"convert {name} has no option {unknown[0]!r} (it has {', '.join(sorted(known))})")
        if "text" in overrides and "text_shares" not in overrides:  # which were of the texts before
            given = {key: value for key, value in given.items() if key != "text_shares"}
        chosen = given | {key: value for key, value in overrides.items() if key in known}
        line = _line({key: value for key, value in chosen.items() if value is not None}, known, f"step {number} ({name})")
        _parse(group.commands[name], line, f"step {number} ({name})")
        own = {key: value for key, value in given.items() if key not in overrides and value is not None}
        asked |= dict.fromkeys(_asked(own, known, f"step {number} ({name})"))
        if not any_paths:
            _require_inside(own, known, f"step {number} ({name})")
        lines.append([name, *line])
    if asked:
        raise Refusal(
            f"the recipe asks for {', '.join(asked)}: only the command line may allow that",
            hint=f"if you trust the recipe, add {' '.join(f'--set {shlex.quote(one)}' for one in asked)}",
        )
    return lines


def _asked(given: dict[str, Any], known: dict[str, click.Parameter], step: str) -> list[str]:
    """Settings of a recipe that need consent, as KEY=VALUE."""
    found = {key: value for key, value in given.items() if isinstance(known[key], Consented)}
    flags = {key: p for key in found if isinstance(p := known[key], click.Option) and p.is_flag}
    off = {key for key, flag in flags.items() if _flag(flag, key, found[key], step) != [max(flag.opts, key=len)]}
    values = {key: "true" if key in flags else printable(str(value)) for key, value in found.items() if key not in off}
    return [f"{key}={value}" for key, value in values.items()]


def _require_inside(given: dict[str, Any], known: dict[str, click.Parameter], step: str) -> None:
    """Refuse a recipe that would write outside the current directory."""
    here = Path.cwd()
    for key, value in given.items():
        kind = known[key].type
        written = isinstance(kind, click.Path) and not kind.exists
        if written and isinstance(value, str) and here not in Path(value).resolve().parents:
            raise Refusal(
                f"{step} of the recipe would write to {value}, which is not inside the directory that it is run in",
                hint=f"allow it with --allow-paths, or say where with --set {key}=PATH",
            )


def _split(setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not equals:
        raise Refusal(f"--set {setting}: give KEY=VALUE")
    return key.replace("-", "_"), value


def _parameters(name: str, group: click.Group) -> dict[str, click.Parameter]:
    """A command's parameters by the name a recipe gives them: a long option without dashes, or an argument."""
    command = group.commands.get(name)
    if command is None or name in _NEVER:
        known = ", ".join(sorted(set(group.commands) - set(_NEVER)))
        raise Refusal(f"a recipe cannot run {name!r} (choose {known})")
    names: dict[str, click.Parameter] = {}
    for parameter in command.params:
        longest = max(parameter.opts, key=len)
        names[longest.lstrip("-").replace("-", "_")] = parameter
    return names


def _line(chosen: dict[str, Any], known: dict[str, click.Parameter], step: str) -> list[str]:
    """The command line of one step: options as `--name=value`, then arguments in the order in which the command takes them."""
    options, arguments = [], []
    for key, parameter in known.items():
        if key not in chosen:
            if isinstance(parameter, click.Argument) and parameter.required:
                word = "DIR" if isinstance(parameter.type, click.Path) else key.upper()
                raise Refusal(
                    f"{step} of the recipe: {key} is missing", hint=f"add it to the recipe, or give --set {key}={word}"
                )
            continue
        if isinstance(parameter, click.Argument):
            arguments += _values(parameter, key, chosen[key], step)
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            options += _flag(parameter, key, chosen[key], step)
        else:
            options += [f"{max(parameter.opts, key=len)}={value}" for value in _values(parameter, key, chosen[key], step)]
    return [*options, *(["--", *arguments] if arguments else [])]


def _values(parameter: click.Parameter, key: str, value: Any, step: str) -> list[str]:
    many = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    values = value if isinstance(value, list) and many else [value]
    for single in values:
        if said := _not_a_value(single):
            raise Refusal(f"{step} of the recipe: {key} takes {'values' if many else 'one value'}, not {said}", hint=_QUOTE)
    return [str(single) for single in values]


def _not_a_value(value: Any) -> str | None:
    """The value that stands where a string or a number should; it is not shown, since aliases may have made it endless."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str) and "\0" in value:
        return "text with a NUL character"
    if isinstance(value, str | int | float):
        return None
    names: dict[type, str] = {list: "a list", dict: "a mapping", type(None): "null", datetime.date: "a date"}
    return names.get(type(value), f"a {type(value).__name__}")


def _flag(parameter: click.Option, key: str, value: Any, step: str) -> list[str]:
    try:
        on = click.BOOL.convert(value, parameter, None) if isinstance(value, bool | str) else None
    except click.BadParameter:
        on = None
    if on is None:
        raise Refusal(f"{step} of the recipe: {key} takes true or false", hint=f"{key}: true")
    return [max(parameter.opts, key=len)] if on else parameter.secondary_opts[:1]  # --no-…, where there is one


def _parse(command: click.Command, line: list[str], step: str) -> None:
    """Let click take a command line apart, without running it."""
    try:
        with command.make_context(command.name, copy.copy(line)):
            pass
    except click.UsageError as error:
        raise Refusal(f"{step} of the recipe: {' '.join(error.format_message().split())}") from None
