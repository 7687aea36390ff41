"""A healing in words and as facts: its plan, and what it reached."""

from __future__ import annotations

from typing import Any

from convert.healing.memory import expected
from convert.healing.plan import HealPlan
from convert.healing.texts import OWN
from convert.planning.texts import names_of
from eval.report.sections import loss_text

_TRAINS = {
    "attention": "the attention and the norms before it",
    "lora": "matrices of rank {rank} beside those of the attention (LoRA), and the norms before it",
    "all": "all weights",
}


def facts(plan: HealPlan, passes: float) -> dict[str, Any]:
    """The plan for `--json`: numbers stay numbers."""
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
        "lora_rank": o.lora_rank,
        "ce": o.ce,
        "checkpointing": o.checkpointing,
        "memory_bytes": expected(plan),
        "notes": list(plan.notes),
        "output": str(plan.output.path),
    }


def plan_text(plan: HealPlan, passes: float) -> str:
    """The plan, for a terminal."""
    parts = {name: size / 1e9 for name, size in expected(plan).items()}
    listed = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
    return "\n".join([*_lines(plan, passes), f"memory: about {sum(parts.values()):.2f} GB ({listed})"])


def healed_text(plan: HealPlan, passes: float, provenance: dict[str, Any]) -> str:
    """A finished healing, for a terminal."""
    found = provenance["healing"]
    before, after = found["before"], found["after"]
    kl = f"KL {before['kl']:.4f} → {after['kl']:.4f}"
    lines = [
        f"on {found['held_out_tokens']} tokens of it that no step saw: {kl}, "
        f"loss over the teacher {before['loss_nats']:+.4f} → {loss_text(after['loss_nats'])}",
    ]
    if not provenance["tensors"]["healed"]:
        lines.append("the weights are those of the converted checkpoint: there was nothing to gain")
    if "evaluation" in provenance:
        source, *others = provenance["evaluation"]["models"]
        lines.append(f"perplexity on {source['tokens']} tokens of {provenance['evaluation']['protocol']['text']}: ")
        lines[-1] += f"source {source['perplexity']:.4g}, " + ", ".join(
            f"{entry['name']} {entry['perplexity']:.4g} at {loss_text(entry['loss_nats'])}" for entry in others
        )
    return "\n".join([*_lines(plan, passes), *lines, f"written to {plan.output.path}"])


def _chosen_rate(plan: HealPlan) -> str:
    if plan.trial_steps:
        return f"learning rate chosen among three or more, each tried for {plan.trial_steps} steps"
    return "learning rate by the width and the loss: the steps are too few to try others"


def _lines(plan: HealPlan, passes: float) -> list[str]:
    o = plan.options
    rate = f"learning rate {o.lr:g}" if o.lr else _chosen_rate(plan)
    again = f", which goes over the text {passes:.2g} times" if passes > 1 else f", {passes:.0%} of the text"
    return [
        f"{plan.spec.kind} {plan.converted.reference}, distilled from {plan.teacher.reference}: KL to the teacher"
        + (f" + {o.ce:g} × cross-entropy" if o.ce else ""),
        f"{plan.tokens} tokens of {names_of(o.texts, OWN)} in {plan.steps} steps of {plan.batch} × {plan.context}{again}",
        f"trains {_TRAINS[o.train].format(rank=o.lora_rank)}; {rate}",
        *plan.notes,
    ]
