"""A conversion as its caller gets it: the plan, with the choices that a text decided, and its record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.spec import AttentionSpec
from convert.planning.base import Plan
from convert.planning.describe import conversion_text, plan_text
from convert.planning.targets import LatentTarget


@dataclass(frozen=True)
class Conversion:
    """A conversion that was done or, after `dry_run=True`, planned.

    Attributes:
        plan: The plan of the conversion; after it, with the choices that the text decided.
        record: The content of conversion.json; None after a dry run.
        expected_seconds: After a dry run, how long the conversion will take here.
    """

    plan: Plan
    record: dict[str, Any] | None
    expected_seconds: float | None = None

    @classmethod
    def of(cls, plan: Plan, record: dict[str, Any]) -> Conversion:
        """A plan with the choices that a record states, and the record."""
        plan = next((split for split in splits_of(plan) if split.recipe() == record.get("recipe")), plan)
        if (ranks := record.get("kv_lora_ranks")) and isinstance(plan.target, LatentTarget):
            plan = plan.choosing(plan.target.with_ranks(tuple(ranks)))
        return cls(plan, record)

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

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Each layer's errors, as in conversion.json."""
        return list(self.record["layers"]) if self.record else []

    @property
    def report(self) -> dict[str, Any] | None:
        """The evaluation, if one was asked for: `{"protocol", "models": [source, converted]}`."""
        return self.record.get("evaluation") if self.record else None

    def as_dict(self) -> dict[str, Any]:
        """The plan's facts and, where the conversion was done, its record."""
        if self.record is None:
            return self.plan.as_dict() | {"expected_seconds": self.expected_seconds}
        return self.plan.as_dict() | {"conversion": self.record}

    def __str__(self) -> str:
        return plan_text(self.plan, self.expected_seconds) if self.record is None else conversion_text(self.plan, self.record)


def splits_of(plan: Plan) -> list[Plan]:
    """The plans among which the text decides."""
    return [plan.choosing(split) for split in plan.target.splits] if isinstance(plan.target, LatentTarget) else []
