"""A conversion as its caller gets it: the plan, and what was made by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.calibrated import Calibrated
from attention.spec import AttentionSpec
from convert.planning.base import Plan
from convert.planning.texts import names_of
from eval.report.quality import loss_text


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
        lines = _plan_lines(self.plan, self.plan.target.spec)
        return "\n".join([*lines, *_said(self.plan.calibrated), f"would be written to {_where(self.plan)}"])


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
        said = self.provenance
        measured = (*_healing_lines(said), *_check_lines(said), *_quality_lines(said))
        lines = [*_plan_lines(self.plan, self.after), *measured, f"written to {_where(self.plan)}"]
        return "\n".join([*lines, *_said(Calibrated.read(said))])


def _said(calibrated: Calibrated | None) -> list[str]:
    """For how many positions a result is calibrated, if that is not for all."""
    return [f"{calibrated} (--calibration-context N calibrates for N)"] if calibrated else []


def _where(plan: Plan) -> str:
    host = plan.target.host
    return f"{plan.output.path}, loads in {host.loads_in} as {host.layout(plan.family).model_type}"


def _plan_lines(plan: Plan, spec: AttentionSpec) -> list[str]:
    method, text = plan.target.method, plan.calibration
    (before, after), at = plan.kv_bytes_per_token(spec), plan.before.at_context(plan.context)
    kept = plan.cache_dtype if plan.cache_dtype == plan.source.dtype else f"{plan.cache_dtype}, was {plan.source.dtype}"
    how = f"method {method.name} ({method.summary})" if plan.applied_method else "nothing to change"
    if text:
        how += f", calibrated on at most {text.tokens} tokens of {names_of(text.texts)} in blocks of {text.context}"
        how += f" for contexts of {text.max_context}" if text.max_context != text.context else ""
    words = {"cast": f"cast to {plan.output.dtype}"}
    if text:
        words |= {"refine": f"{text.refine} steps of refinement", "heal": f"heal the whole on {text.heal} tokens"}
    steps = [words.get(step, step) for step in plan.steps]
    return [
        f"{plan.before.kind} → {spec.kind}, {how}",
        *([f"steps: {' → '.join(steps)}"] if steps[1:] or steps != plan.steps else []),  # if that is more than the method
        f"KV cache: {before:.0f} → {after:.0f} bytes per token{at} ({after / before:.1%}, kept in {kept})",
        *plan.notes,
    ]


def _healing_lines(provenance: Mapping[str, Any]) -> list[str]:
    if not (healing := provenance.get("healing")):
        return []
    before, after = (healing[when]["kl"] for when in ("before", "after"))
    if not provenance["tensors"]["healed"]:
        return [f"healing gained nothing: KL {before:.4f} on {healing['held_out_tokens']} tokens that were held out"]
    return [f"healed on {healing['tokens']} tokens: KL {before:.4f} → {after:.4f} on {healing['held_out_tokens']} others"]


def _check_lines(provenance: Mapping[str, Any]) -> list[str]:
    if not (check := provenance.get("check")):
        return []
    found = [f"{loss_text(one['loss_nats'], '+.3f')} on {one['tokens']} tokens of {one['text']}" for one in check["texts"]]
    return [f"checked on text that was not fitted: {', '.join(found)}"]


def _quality_lines(provenance: Mapping[str, Any]) -> list[str]:
    if "evaluation" not in provenance:
        return []
    source, *others = provenance["evaluation"]["models"]
    return [
        f"perplexity: {source['perplexity']:.4g} → {converted['perplexity']:.4g} at {loss_text(converted['loss_nats'])} on "
        f"{converted['tokens']} tokens of {provenance['evaluation']['protocol']['text']}, KL {converted['kl_to_source']:.4f}, "
        f"top-1 agreement {converted['top1_agreement']:.1%}"
        + (f", with its cache in {form}" if (form := converted.get("cache_format")) else "")
        for converted in others
        if converted["path"] != source["path"]
    ]
