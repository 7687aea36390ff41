"""What is said of a healing: to its caller, in conversion.json and in README.md.

conversion.json is the conversion's own, with the recipe of the healing, its curve and the versions. The result loads and serves
as the converted checkpoint does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention.calibrated import OF_SOURCE, POSITIONS, STATED, Calibrated
from attention.spec import AttentionSpec
from convert.healing.plan import HealPlan
from convert.healing.texts import OWN, TrainingText
from convert.output.card import command_line, metadata_of, render, stated
from convert.output.destination import read_provenance, versions
from convert.planning.texts import as_options, names_of
from eval.report.quality import loss_text

if TYPE_CHECKING:
    from convert.healing.loop import Outcome

# Of the conversion alone, beside the healing's own.
_OF_CONVERSION = ("recipe", "versions", "tensors", "layers", "kvfold", "healing")
_OF_ONE_RUN = ("run", "evaluation", "healing", "conversion", POSITIONS, OF_SOURCE, STATED)
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
        passes: How often the steps go over the text.
    """

    plan: HealPlan
    passes: float

    @property
    def output(self) -> Path:
        """The checkpoint's directory."""
        return self.plan.output.path

    def as_dict(self) -> dict[str, Any]:
        """The plan's facts: numbers stay numbers."""
        plan, o = self.plan, self.plan.options
        return {
            "command": "heal",
            "converted": plan.converted.reference,
            "teacher": plan.teacher.reference,
            "kind": plan.spec.kind,
            "tokens": plan.tokens,
            "passes": self.passes,
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
            "memory_bytes": plan.memory(),
            "output": str(plan.output.path),
        }

    def __str__(self) -> str:
        parts = {name: size / 1e9 for name, size in self.plan.memory().items()}
        listed = ", ".join(f"{name} {size:.2f}" for name, size in parts.items())
        return "\n".join([*self._lines(), f"memory: {sum(parts.values()):.2f} GB ({listed}), and activations"])

    def _lines(self) -> list[str]:
        plan, passes, o = self.plan, self.passes, self.plan.options
        tried = f"chosen among three or more, each tried for {plan.trial_steps} steps" if plan.trial_steps else ""
        rate = f"{o.lr:g}" if o.lr else tried or "by the loss: the steps are too few to try others"
        again = f", which goes over the text {passes:.2g} times" if passes > 1 else f", {passes:.0%} of the text"
        return [
            f"{plan.spec.kind} {plan.converted.reference}, distilled from {plan.teacher.reference}: KL to the teacher",
            f"{plan.tokens} tokens of {names_of(o.texts, OWN)} in {plan.steps} steps of {plan.batch} × {plan.context}{again}",
            f"trains {_TRAINS[o.train].format(rank=plan.lora_rank)}; learning rate {rate}",
        ]


@dataclass(frozen=True)
class Healing(PlannedHealing):
    """A healing that was done.

    Attributes:
        provenance: The content of conversion.json.
    """

    provenance: dict[str, Any]

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
        return super().as_dict() | {"conversion": self.provenance}

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
        return "\n".join([*self._lines(), *lines, f"written to {self.output}"])


def provenance_of(plan: HealPlan, texts: list[dict[str, Any]], text: TrainingText, outcome: Outcome) -> dict[str, Any]:
    """conversion.json without its `run`: the same inputs and seed give the same content.

    Args:
        plan: The plan.
        texts: What there is to say of each text.
        text: All of them, as they were trained on.
        outcome: What it came to.
    """
    before, source, context = read_provenance(plan.converted.files), plan.teacher, plan.teacher.longest_context
    conversion = before.get("conversion") or {key: before[key] for key in _OF_CONVERSION if before.get(key) is not None}
    spec = AttentionSpec.from_config(source.config)
    return {
        "source": {"model": source.reference, "revision": source.commit},
        "kind": plan.spec.kind,
        **{key: value for key, value in before.items() if key not in _OF_ONE_RUN + _OF_CONVERSION},
        "kvfold": version("kvfold"),
        "recipe": {"heal": plan.recipe()},
        "kv_bytes_per_token": {
            "before": spec.bytes_per_token(source.dtype, context),
            "after": plan.spec.bytes_per_token(plan.cache_dtype, context),
            "cache_dtype": plan.cache_dtype,
            **({"context": context} if spec.is_cut(context) else {}),
        },
        "healing": {
            "teacher": source.reference,
            "converted": plan.converted.reference,
            "texts": texts,
            **course_of(plan, text, outcome),
        },
        "conversion": conversion,
        "tensors": {"healed": sorted(outcome.weights)},
        "versions": versions(),
    }


def course_of(plan: HealPlan, text: TrainingText, outcome: Outcome) -> dict[str, Any]:
    """The texts of a healing, and its outcome."""
    progressed, after = outcome.progressed, outcome.after
    first = progressed.curve[0]
    return {
        "text": text.tokens.name,
        "text_hash": text.tokens.hash,
        "tokens": progressed.curve[-1].tokens,
        "passes": text.passes(progressed.step, plan.batch),
        "held_out_tokens": len(text.held_out) * plan.context,
        "rate": progressed.rate,
        "rates_tried": progressed.tried,
        "before": {"kl": first.kl, "loss_nats": first.loss_nats},
        "after": {"kl": after.kl, "loss_nats": after.loss_nats, "step": after.step},
        "curve": [asdict(point) for point in progressed.curve],
    }


def card(plan: HealPlan, provenance: dict[str, Any]) -> str:
    """The text of README.md, from conversion.json without its `run`."""
    options = plan.recipe() | as_options(plan.options.texts) | {"teacher": plan.teacher.reference}
    del options["converted"]
    return render(
        "healing.md.j2",
        stated(provenance, "metadata") or metadata_of(plan.teacher.repository, [], plan.converted.files),
        kind=plan.spec.kind,
        base=plan.teacher.repository or plan.teacher.name,
        command=command_line("heal", plan.converted.reference, options),
        provenance=provenance,
        healing=provenance["healing"],
        bytes=provenance["kv_bytes_per_token"],
        rounding=plan.rounding,
        evaluation=provenance.get("evaluation"),
        loading=stated(provenance, "loading"),
        calibrated=Calibrated.read(provenance),
    )
