"""The model card of a healed checkpoint: README.md. How to load and serve it is what the converted checkpoint's card says."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

from convert.healing.plan import HealPlan
from convert.planning.texts import as_options
from eval.terminal.escapes import markdown, shell_line

_LOADING, _LAST = "## Loading\n", "`conversion.json` has"
_UNKNOWN = "## Loading\n\nThis checkpoint loads and runs as the one that it was healed from.\n"


def card(plan: HealPlan, record: dict[str, Any]) -> str:
    """The text of README.md.

    Args:
        plan: The plan that was carried out.
        record: conversion.json without its `run`.
    """
    path = plan.converted.files / "README.md"
    before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return _template().render(
        front_matter=_front_matter(before),
        kind=plan.spec.kind,
        base=plan.teacher.repository or plan.teacher.name,
        command=_command(plan),
        record=record,
        healing=record["healing"],
        bytes=record.get("kv_bytes_per_token"),
        evaluation=record.get("evaluation"),
        loading=_loading(before),
    )


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["markdown"] = lambda value: markdown(str(value))
    return environment.from_string(files("convert.healing").joinpath("card.md.j2").read_text(encoding="utf-8"))


def _front_matter(before: str) -> str:
    """The Hub's metadata, as the converted checkpoint has it: licence, source and tags."""
    parts = before.split("---\n", 2)
    return f"---\n{parts[1]}---\n\n" if len(parts) == 3 and not parts[0].strip() else ""


def _loading(before: str) -> str:
    """The part of the converted checkpoint's card on loading and serving, up to the line on its recipe."""
    _, found, rest = before.partition(_LOADING)
    return f"{found}{rest.partition(_LAST)[0]}".rstrip() + "\n" if found else _UNKNOWN


def _command(plan: HealPlan) -> str:
    """The command line, with paths as the user gave them."""
    ((command, options),) = plan.recipe().items()
    shown = options | as_options(plan.options.texts) | {"teacher": plan.teacher.reference}
    shown.pop("converted")
    if shown.pop("strings", None):
        shown["text"] = "TEXT"
    flags: list[str] = []
    for name, value in shown.items():
        flag, values = f"--{name.replace('_', '-')}", value if isinstance(value, list) else [value]
        flags += [flag] if value is True else [part for one in values for part in (flag, str(one))]
    model = plan.converted.reference
    return shell_line(["convert", command, f"./{model}" if model.startswith("-") else model, "OUTPUT", *flags])
