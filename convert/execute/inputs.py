"""Lists the inputs that decide the bytes of a conversion."""

from __future__ import annotations

from typing import Any

from convert.execute.job import device_of
from convert.output.destination import without_text
from convert.output.provenance import versions
from convert.planning.base import Plan
from convert.planning.calibration import GivenTexts
from eval.machine.device import rough


def inputs_of(plan: Plan, texts: GivenTexts | None) -> dict[str, Any]:
    """List the inputs that decide the result's bytes, without its healing, which a resumed run may leave out."""
    return {
        **_settings(plan),
        "device": str(device_of(plan)),
        "rough_products_in": str(rough(device_of(plan))),
        "config": plan.source.raw,
        "files": plan.source.fingerprint,
        "calibration_hashes": texts.hashes if texts else [],
        "rows_to_write": plan.calibration.rows_to_write if plan.calibration else 0,
        "versions": versions(),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    return {"command": plan.recipe.command, **without_text(plan.recipe.options), "heal": None}


def healing_of(plan: Plan) -> dict[str, Any]:
    """Name the tokens of the healing, the one input that a resumed run may leave out."""
    return {"heal": plan.calibration.heal if plan.calibration else None}
