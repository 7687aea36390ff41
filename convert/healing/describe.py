"""A healing as its caller gets it: facts and words on its plan, and on what it reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.healing.costs import expected
from convert.healing.plan import HealPlan
from convert.healing.texts import OWN
from convert.planning.texts import names_of
from eval.report.sections import loss_text

_TRAINS = {
    "attention": "the attention and the norms before it",
    "lora": "matrices of rank {rank} beside those of the attention (LoRA), and the norms before it",
    "all": "all weights",
}


@dataclass(frozen=True)
class PlannedHealing:
    """A healing that a dry run has planned.

    Attributes:
        plan: Every number decided.
        passes: How often the steps will go over the text.
    """

    plan: HealPlan
    passes: float

    def as_dict(self) -> dict[str, Any]:
        """The plan's facts: numbers stay numbers."""
        return _facts(self.plan, self.passes)

    def __str__(self) -> str:
        parts = {name: size / 1e9 for name, size in expected(self.plan).items()}
        listed = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
        return "\n".join([*_lines(self.plan, self.passes), f"memory: about {sum(parts.values()):.2f} GB ({listed})"])


@dataclass(frozen=True)
class Healing:
    """A healing that was done.

    Attributes:
        plan: Every number decided.
        provenance: The content of conversion.json.
    """

    plan: HealPlan
    provenance: dict[str, Any]

    @property
    def output(self) -> Path:
        """The checkpoint's directory."""
        return self.plan.output.path

    @property
    def passes(self) -> float:
        """How often the steps went over the text."""
        return float(self.provenance["healing"]["passes"])

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The points of the curve, from before the first step on."""
        return list(self.provenance["healing"]["curve"])

    @property
    def report(self) -> dict[str, Any] | None:
        """The evaluation, if one was asked for: `{"protocol", "models": [source, converted, healed]}`."""
        return self.provenance.get("evaluation")

    def as_dict(self) -> dict[str, Any]:
        """The plan's facts, and the provenance."""
        return _facts(self.plan, self.passes) | {"conversion": self.provenance}

    def __str__(self) -> str:
        found = self.provenance["healing"]
        before, after = found["before"], found["after"]
        lines = [
            f"on {found['held_out_tokens']} tokens of it that no step saw: KL {before['kl']:.4f} → {after['kl']:.4f}, "
            f"loss over the teacher {before['loss_nats']:+.4f} → {loss_text(after['loss_nats'])}",
        ]
        if not self.provenance["tensors"]["healed"]:
            lines.append("the weights are those of the converted checkpoint: there was nothing to gain")
        if self.report is not None:
            source, *others = self.report["models"]
            lines.append(
                f"perplexity on {source['tokens']} tokens of {self.report['protocol']['text']}: "
                f"source {source['perplexity']:.4g}, "
                + ", ".join(f"{one['name']} {one['perplexity']:.4g} at {loss_text(one['loss_nats'])}" for one in others)
            )
        return "\n".join([*_lines(self.plan, self.passes), *lines, f"written to {self.output}"])


def _facts(plan: HealPlan, passes: float) -> dict[str, Any]:
    o = plan.options
    return {
        "command": "heal",
        "converted": plan.converted.reference,
        "teacher": plan.teacher.reference,
        "kind": plan.spec.kind,
        "tokens": plan.tokens,
        "passes": passes,
        "context": plan.context,
        "batch_tokens": plan.batch * plan.context,
        "micro_batch_tokens": plan.micro_batch * plan.context,
        "steps": plan.steps,
        "eval_every": plan.every * plan.batch * plan.context,
        "lr": o.lr,
        "trial_steps": plan.trial_steps,
        "train": o.train,
        "lora_rank": plan.lora_rank,
        "checkpointing": o.checkpointing,
        "memory_bytes": expected(plan),
        "notes": list(plan.notes),
        "output": str(plan.output.path),
    }


def _lines(plan: HealPlan, passes: float) -> list[str]:
    o = plan.options
    rate = f"learning rate {o.lr:g}" if o.lr else "learning rate by the width and the loss: the steps are too few to try others"
    if plan.trial_steps:
        rate = f"learning rate chosen among three or more, each tried for {plan.trial_steps} steps"
    again = f", which goes over the text {passes:.2g} times" if passes > 1 else f", {passes:.0%} of the text"
    return [
        f"{plan.spec.kind} {plan.converted.reference}, distilled from {plan.teacher.reference}: KL to the teacher",
        f"{plan.tokens} tokens of {names_of(o.texts, OWN)} in {plan.steps} steps of {plan.batch} × {plan.context}{again}",
        f"trains {_TRAINS[o.train].format(rank=plan.lora_rank)}; {rate}",
        *plan.notes,
    ]
