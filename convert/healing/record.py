"""conversion.json of a healed checkpoint: the conversion's own, the recipe of the healing, its curve and the versions."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from convert.checkpoint.workdir import recorded
from convert.execute.record import versions
from convert.healing.batches import TrainingText
from convert.healing.plan import HealPlan
from convert.healing.states import Progressed

_OF_ONE_RUN = ("run", "evaluation", "recipe", "versions", "tensors", "healing", "conversion")


def record_of(plan: HealPlan, text: TrainingText, progressed: Progressed, healed: list[str]) -> dict[str, Any]:
    """conversion.json without its `run`: the same inputs and seed give the same content.

    Args:
        plan: The plan.
        text: The text that was trained on.
        progressed: The rate and the curve.
        healed: The names of the trained tensors; empty if the weights are those of the converted checkpoint.
    """
    before = recorded(plan.converted.files)
    first, best = progressed.curve[0], progressed.best
    return {
        "kvfold": version("kvfold"),
        "source": {"model": plan.teacher.reference, "revision": plan.teacher.commit},
        "kind": plan.spec.kind,
        **{key: value for key, value in before.items() if key not in _OF_ONE_RUN},
        "recipe": plan.recipe(),
        "healing": {
            "teacher": plan.teacher.reference,
            "converted": plan.converted.reference,
            "text": text.tokens.name,
            "text_hash": text.tokens.hash,
            "tokens": progressed.curve[-1].tokens,
            "passes": text.passes(plan.steps, plan.batch),
            "held_out_tokens": text.held_out.numel(),
            "rate": progressed.rate,
            "rates_tried": progressed.tried,
            "before": {"kl": first.kl, "loss_nats": first.loss_nats},
            "after": {"kl": best.kl, "loss_nats": best.loss_nats, "step": best.step},
            "curve": [point.as_dict() for point in progressed.curve],
        },
        "conversion": {key: before[key] for key in ("recipe", "versions", "tensors", "healing") if key in before},
        "tensors": {"healed": healed},
        "versions": versions(),
    }
