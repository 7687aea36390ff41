"""Recipes: turns commands and options from a YAML file or a conversion.json into command lines.

A recipe is `{command: {option: value, …}}`, or a list of such steps. Keys are option names, with _ or -.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from attention.errors import Refusal


def read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The steps of a recipe file.

    Raises:
        Refusal: The file is not a recipe.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} is no YAML: {' '.join(str(error).split())[:200]}") from None
    if isinstance(data, dict) and "recipe" in data and "kvfold" in data:
        data = data["recipe"]  # a conversion.json
    steps = data if isinstance(data, list) and data else [data]
    for step in steps:
        if not (isinstance(step, dict) and len(step) == 1 and isinstance(next(iter(step.values())), dict | None)):
            raise Refusal(
                f"{path} is no recipe: each step is one command with its options", hint="gqa: {model: …, output: …, groups: 8}"
            )
    commands = [(str(name), given or {}) for step in steps for name, given in step.items()]
    return [(name, {str(key).replace("-", "_"): value for key, value in given.items()}) for name, given in commands]


def command_lines(steps: list[tuple[str, dict[str, Any]]], settings: Sequence[str], group: click.Group) -> Iterator[list[str]]:
    """The arguments of each step, after `settings` have overridden them.

    Args:
        steps: From `read`.
        settings: "KEY=VALUE", applied to every step that has the option.
        group: The click group with the commands.

    Raises:
        Refusal: A command or an option does not exist.
    """
    overrides = dict(_split(setting) for setting in settings)
    parameters = {name: _parameters(name, group) for name, _ in steps}
    for key in overrides:
        if not any(key in known for known in parameters.values()):
            raise Refusal(f"--set {key}: no step of this recipe has that option")
    for name, given in steps:
        known = parameters[name]
        if unknown := sorted(set(given) - set(known)):
            raise Refusal(f"convert {name} has no option {unknown[0]!r} (it has {', '.join(sorted(known))})")
        chosen = given | {key: value for key, value in overrides.items() if key in known}
        chosen = {key: value for key, value in chosen.items() if value is not None}
        yield [name, *(argument for key, value in chosen.items() for argument in _arguments(known[key], value))]


def _split(setting: str) -> tuple[str, str]:
    key, equals, value = setting.partition("=")
    if not equals:
        raise Refusal(f"--set {setting}: give KEY=VALUE")
    return key.replace("-", "_"), value


def _parameters(name: str, group: click.Group) -> dict[str, click.Parameter]:
    """A command's parameters by the name a recipe gives them: a long option without dashes, or an argument."""
    command = group.commands.get(name)
    if command is None or name == "run":
        known = ", ".join(sorted(set(group.commands) - {"run"}))
        raise Refusal(f"a recipe cannot run {name!r} (choose {known})")
    names: dict[str, click.Parameter] = {}
    for parameter in command.params:
        longest = max(parameter.opts, key=len)
        names[longest.lstrip("-").replace("-", "_")] = parameter
    return names


def _arguments(parameter: click.Parameter, value: Any) -> list[str]:
    many = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    if isinstance(value, dict) or (isinstance(value, list) and not many):
        raise Refusal(f"{parameter.name} of a recipe takes one value, not {value!r}")
    values = [str(v) for v in value] if isinstance(value, list) else [str(value)]
    if isinstance(parameter, click.Argument):
        return values
    flag = max(parameter.opts, key=len)
    if isinstance(parameter, click.Option) and parameter.is_flag:
        negative = parameter.secondary_opts[:1]  # --no-…, if the option has one
        return [flag] if click.BOOL.convert(value, parameter, None) else negative
    return [part for v in values for part in (flag, v)]
