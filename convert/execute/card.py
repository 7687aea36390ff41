"""The model card of a converted checkpoint, and what its provenance keeps for the cards of those that are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from attention.calibrated import Calibrated
from attention.spec import AttentionSpec
from convert.hosts import Host
from convert.hosts.engines import ENGINES, Engine
from convert.output.card import command_line, render
from convert.planning.base import Plan
from convert.planning.texts import as_options
from eval.inputs.overlap import WARN_ABOVE
from eval.report.sections import loss_text
from eval.terminal.escapes import markdown


def model_card(plan: Plan, provenance: dict[str, Any]) -> str:
    """The text of README.md for a conversion.

    Args:
        plan: The plan that was carried out.
        provenance: conversion.json without its `run`.
    """
    evaluation = provenance.get("evaluation")
    return render(
        "conversion.md.j2",
        provenance["metadata"],
        after=plan.sized(provenance.get("kv_lora_ranks")),
        before_kind=plan.before.kind,
        base=plan.source.repository or plan.source.name,
        link=f"https://huggingface.co/{quote(plan.source.repository)}" if plan.source.repository else None,
        summary=_summary(plan, provenance),
        command=_command(plan),
        bytes=provenance["kv_bytes_per_token"],
        plan=plan,
        provenance=provenance,
        evaluation=evaluation,
        warn_above=WARN_ABOVE,
        protocol=evaluation["protocol"] if evaluation else None,
        compared=compared(evaluation["models"]) if evaluation else [],
        loading=provenance["loading"],
        loss_text=loss_text,
        calibrated=Calibrated.read(provenance),
    )


def compared(entries: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The source and the result of an evaluation: first as they are, then with their caches in each format.

    A source whose heads cannot have a format is compared as it is.
    """
    found = []
    for form in dict.fromkeys(entry["cache_format"] for entry in entries):
        *sources, result = (entry for entry in entries if entry["cache_format"] == form)
        found.append((sources[0] if sources else entries[0], result))
    return found


def loading_of(plan: Plan, spec: AttentionSpec) -> dict[str, Any]:
    """How to load and serve a result of these sizes, as conversion.json keeps it and cards say it."""
    host, own = plan.target.host, plan.target.host.name == "its own class"
    made = (host, plan.family, spec)
    objections = {engine: engine.objection(*made) for engine in ENGINES.values() if engine.serve}
    served = [engine for engine, objection in objections.items() if objection is None]
    return {
        "model_type": host.layout(plan.family).model_type,
        "needs_code": bool(host.code),
        "opened_by": host.opened_by,
        "arguments": dict(host.loading),
        "engines": [
            {
                "name": f"{engine.name}, if it runs the source" if own else engine.name,
                "objection": objection,
                "command": engine.serve.format(path="path/to/this/directory"),
            }
            for engine, objection in objections.items()
        ],
        "remarks": [
            *host.remarks,
            *_cache_remarks(host, spec, served),
        ],
    }


def _cache_remarks(host: Host, spec: AttentionSpec, engines: list[Engine]) -> list[str]:
    """In which formats these engines store the result's cache, and with what option."""
    found = []
    for engine in engines:
        caches = engine.stores(host, spec)
        said = [f"{cache.form} with `{cache.option}`{'' if cache.tried else ' (not tried)'}" for cache in caches]
        found += [f"{engine.name} stores the cache in {', or in '.join(said)}."] if said else []
    return found


def _summary(plan: Plan, provenance: dict[str, Any]) -> str:
    if not provenance["method"]:
        return markdown(str(provenance["notes"][0]))
    method = plan.target.method
    return f"method `{method.name}`, {method.summary}{f' ({method.source})' if method.source else ''}"


def _command(plan: Plan) -> str:
    command, options = plan.recipe
    given = as_options(plan.calibration.texts) if plan.calibration else {}
    shown = {name: value for name, value in options.items() if name != "model"} | given
    return command_line(command, options["model"] if plan.source.repository else plan.source.reference, shown)
