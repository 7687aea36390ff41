"""The model card of a healed checkpoint. It loads and serves as the converted one does, whose provenance says how."""

from __future__ import annotations

from typing import Any

from attention.calibrated import Calibrated
from convert.healing.plan import HealPlan
from convert.output.card import command_line, metadata_of, render, stated_loading, stated_metadata
from convert.planning.texts import as_options


def card(plan: HealPlan, provenance: dict[str, Any]) -> str:
    """The text of README.md.

    Args:
        plan: The plan that was carried out.
        provenance: conversion.json without its `run`.
    """
    return render(
        "healing.md.j2",
        stated_metadata(provenance) or metadata_of(plan.teacher.repository, [], plan.converted.files),
        kind=plan.spec.kind,
        base=plan.teacher.repository or plan.teacher.name,
        command=_command(plan),
        provenance=provenance,
        healing=provenance["healing"],
        bytes=provenance["kv_bytes_per_token"],
        rounding=plan.rounding,
        evaluation=provenance.get("evaluation"),
        loading=stated_loading(provenance),
        calibrated=Calibrated.read(provenance),
    )


def _command(plan: HealPlan) -> str:
    ((command, options),) = plan.recipe().items()
    shown = options | as_options(plan.options.texts) | {"teacher": plan.teacher.reference}
    shown.pop("converted")
    return command_line(command, plan.converted.reference, shown)
