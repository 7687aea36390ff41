"""The model card of a converted checkpoint: README.md with the front matter that the Hub reads."""

from __future__ import annotations

import functools
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from convert.hosts.engines import ENGINES
from convert.planning.base import Plan
from convert.planning.texts import as_options
from eval.inputs.overlap import WARN_ABOVE
from eval.terminal.escapes import markdown, shell_line


def model_card(plan: Plan, record: dict[str, Any], directory: Path) -> str:
    """The text of README.md for a conversion.

    Args:
        plan: The plan that was carried out.
        record: conversion.json without its `run`: the card holds nothing that differs between runs.
        directory: The source's files; the result inherits the licence that their card names.
    """
    evaluation = record.get("evaluation")
    source, converted = evaluation["models"] if evaluation else (None, None)
    return _template().render(
        front_matter=_front_matter(plan, directory),
        kind=plan.target.spec.kind,
        before_kind=plan.before.kind,
        base=plan.source.repository or plan.source.name,
        link=f"https://huggingface.co/{quote(plan.source.repository)}" if plan.source.repository else None,
        summary=_summary(plan, record),
        command=_command(plan),
        bytes=record["kv_bytes_per_token"],
        plan=plan,
        record=record,
        evaluation=evaluation,
        warn_above=WARN_ABOVE,
        protocol=evaluation["protocol"] if evaluation else None,
        source=source,
        converted=converted,
        model_type=plan.target.host.layout(plan.family).model_type,
        served=_served(plan),
    )


@functools.cache  # to compile it takes longer than to convert a tiny model
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["markdown"] = lambda value: markdown(str(value))
    return environment.from_string(files("convert.execute").joinpath("card.md.j2").read_text(encoding="utf-8"))


def _summary(plan: Plan, record: dict[str, Any]) -> str:
    if not record["method"]:
        return markdown(str(record["notes"][0]))
    method = plan.target.method
    return f"method `{method.name}`, {method.summary}{f' ({method.source})' if method.source else ''}"


def _command(plan: Plan) -> str:
    """The command line, with paths as the user gave them: absolute paths are of no use on another machine."""
    ((command, options),) = plan.recipe().items()
    given = as_options(plan.calibration.texts) if plan.calibration else {}
    options |= {"text": "TEXT"} if options.pop("strings", None) else given  # a program's strings are not in a file
    options |= {"model": plan.source.reference} if plan.source.directory else {}
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if name != "model":
            flags += _flags(flag, value)
    model = options["model"]
    return shell_line(["convert", command, f"./{model}" if model.startswith("-") else model, "OUTPUT", *flags])


def _flags(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    return [part for one in values for part in (f"--{name}", str(one))]


def _served(plan: Plan) -> list[tuple[str, str | None, str]]:
    """Each engine besides transformers: its name, why it does not run the result or None, and the command that serves it."""
    found = [
        (engine, engine.objection(plan.target.host, plan.family, plan.target.spec))
        for engine in ENGINES.values()
        if engine.serve
    ]
    return [(engine.name, objection, engine.serve.format(path="path/to/this/directory")) for engine, objection in found]


def _front_matter(plan: Plan, directory: Path) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=plan.source.repository,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["kvfold", plan.target.command, *([plan.applied_method] if plan.applied_method else [])],
        license=_inherited_licence(directory),
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _inherited_licence(directory: Path) -> Any:
    """The name, or the list of names, that the source's own card gives; None if it gives anything else."""
    from huggingface_hub import ModelCard

    card = directory / "README.md"
    if not card.is_file():
        return None
    try:
        licence = ModelCard.load(card, ignore_metadata_errors=True).data.get("license")
    except Exception:  # anyone may have written it, and YAML's constructors raise whatever Python does
        return None
    names = licence if isinstance(licence, list) else [licence]
    return licence if all(isinstance(name, str) and name.isprintable() for name in names) else None
