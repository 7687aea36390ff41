"""conversion.json of a healed checkpoint: the conversion's own, the recipe of the healing, its curve and the versions."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from attention.calibrated import OF_SOURCE, POSITIONS, STATED
from convert.healing.batches import TrainingText
from convert.healing.plan import HealPlan
from convert.output.destination import read_provenance
from convert.output.provenance import versions

if TYPE_CHECKING:
    from convert.healing.loop import Outcome

# Of the conversion alone, beside the healing's own.
_OF_CONVERSION = ("recipe", "versions", "tensors", "layers", "kvfold", "healing")
_OF_ONE_RUN = ("run", "evaluation", "healing", "conversion", POSITIONS, OF_SOURCE, STATED)


def provenance_of(
    plan: HealPlan, texts: list[dict[str, Any]], text: TrainingText, outcome: Outcome, healed: list[str]
) -> dict[str, Any]:
    """conversion.json without its `run`: the same inputs and seed give the same content.

    Args:
        plan: The plan.
        texts: What there is to say of each text.
        text: All of them, as they were trained on.
        outcome: What it came to.
        healed: The names of the trained tensors; empty if the weights are those of the converted checkpoint.
    """
    before, context = read_provenance(plan.converted.files), plan.teacher.longest_context
    conversion = before.get("conversion") or {key: before[key] for key in _OF_CONVERSION if before.get(key) is not None}
    return {
        "source": {"model": plan.teacher.reference, "revision": plan.teacher.commit},
        "kind": plan.spec.kind,
        **{key: value for key, value in before.items() if key not in _OF_ONE_RUN + _OF_CONVERSION},
        "kvfold": version("kvfold"),
        "recipe": plan.recipe(),
        "kv_bytes_per_token": {
            "before": plan.teacher_spec.bytes_per_token(plan.teacher.dtype, context),
            "after": plan.spec.bytes_per_token(plan.cache_dtype, context),
            "cache_dtype": plan.cache_dtype,
            **({"context": context} if plan.teacher_spec.is_cut(context) else {}),
        },
        "healing": {
            "teacher": plan.teacher.reference,
            "converted": plan.converted.reference,
            "texts": texts,
            **course_of(plan, text, outcome),
        },
        "conversion": conversion,
        "tensors": {"healed": healed},
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
