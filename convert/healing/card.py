"""The model card of a healed checkpoint. It loads and serves as the converted one does, whose record says how."""

from __future__ import annotations

from typing import Any

from convert.healing.plan import HealPlan
from convert.output.card import command_line, metadata_of, recorded_loading, recorded_metadata, render
from convert.planning.texts import as_options


def card(plan: HealPlan, record: dict[str, Any]) -> str:
    """The text of README.md.

    Args:
        plan: The plan that was carried out.
        record: conversion.json without its `run`.
    """
    return render(
        "healing.md.j2",
        recorded_metadata(record) or metadata_of(plan.teacher.repository, [], plan.converted.files),
        kind=plan.spec.kind,
        base=plan.teacher.repository or plan.teacher.name,
        command=_command(plan),
        record=record,
        healing=record["healing"],
        bytes=record.get("kv_bytes_per_token"),
        evaluation=record.get("evaluation"),
        loading=recorded_loading(record),
    )


def _command(plan: HealPlan) -> str:
    ((command, options),) = plan.recipe().items()
    shown = options | as_options(plan.options.texts) | {"teacher": plan.teacher.reference}
    shown.pop("converted")
    return command_line(command, plan.converted.reference, shown)
