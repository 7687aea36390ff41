"""What is written about a healing: conversion.json and README.md.

conversion.json is the conversion's own, with the recipe of the healing, its curve and the versions. The result loads and serves
as the converted checkpoint does.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from attention.calibrated import OF_SOURCE, POSITIONS, STATED, Calibrated
from attention.spec import AttentionSpec
from convert.healing.plan import HealPlan
from convert.healing.texts import TrainingText
from convert.output.card import command_line, inherited_licence, metadata_of, render, stated_loading, stated_metadata
from convert.output.destination import read_provenance
from convert.output.provenance import versions
from convert.planning.texts import as_options

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


def card(plan: HealPlan, provenance: dict[str, Any]) -> str:
    """The text of README.md, from conversion.json without its `run`."""
    options = plan.recipe() | as_options(plan.options.texts) | {"teacher": plan.teacher.reference}
    del options["converted"]
    return render(
        "healing.md.j2",
        stated_metadata(provenance) or metadata_of(plan.teacher.repository, [], inherited_licence(plan.converted.files)),
        kind=plan.spec.kind,
        base=plan.teacher.repository or plan.teacher.name,
        command=command_line("heal", plan.converted.reference, options),
        provenance=provenance,
        healing=provenance["healing"],
        bytes=provenance["kv_bytes_per_token"],
        rounding=plan.rounding,
        evaluation=provenance.get("evaluation"),
        loading=stated_loading(provenance),
        calibrated=Calibrated.read(provenance),
    )
