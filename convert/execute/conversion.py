"""A conversion as its caller gets it: the plan, and what was made by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.spec import AttentionSpec
from convert.planning.base import Plan
from convert.planning.describe import conversion_text, plan_text


@dataclass(frozen=True)
class PlannedConversion:
    """A conversion that a dry run has planned.

    Attributes:
        plan: The plan.
    """

    plan: Plan

    @property
    def output(self) -> Path:
        """The checkpoint's directory."""
        return self.plan.output.path

    @property
    def before(self) -> AttentionSpec:
        """The source's attention."""
        return self.plan.before

    @property
    def after(self) -> AttentionSpec:
        """The result's attention."""
        return self.plan.target.spec

    def as_dict(self) -> dict[str, Any]:
        """The plan's facts."""
        return self.plan.as_dict()

    def __str__(self) -> str:
        return plan_text(self.plan)


@dataclass(frozen=True)
class Conversion(PlannedConversion):
    """A conversion that was done.

    Attributes:
        provenance: The content of conversion.json.
    """

    provenance: dict[str, Any]

    @property
    def after(self) -> AttentionSpec:
        """The result's attention, with the ranks of its layers if the text has chosen them."""
        return self.plan.sized(self.provenance.get("kv_lora_ranks"))

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Each layer's errors, as in conversion.json."""
        return list(self.provenance["layers"])

    @property
    def report(self) -> dict[str, Any] | None:
        """The evaluation, if one was asked for: `{"protocol", "models": [source, converted]}`."""
        return self.provenance.get("evaluation")

    def as_dict(self) -> dict[str, Any]:
        """The plan's facts, and the provenance."""
        return self.plan.as_dict(self.provenance.get("kv_lora_ranks")) | {"conversion": self.provenance}

    def __str__(self) -> str:
        return conversion_text(self.plan, self.provenance)
