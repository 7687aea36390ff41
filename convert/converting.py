"""A conversion, from its plan to the checkpoint at OUTPUT: the order of the work."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.execute.checking import Sample, checked, written
from convert.execute.describe import Conversion, model_card, with_healing
from convert.execute.job import Job
from convert.execute.layers import convert_layers
from convert.execute.manifest import loadable_manifest
from convert.healing.closing import heal_result
from convert.launch import require_alone
from convert.output.companions import write_own_text
from convert.output.evaluation import evaluated
from convert.output.writing import writing
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText
from eval.inputs.text import OneText, joined, text_of, warn_of_overlap
from eval.quality.evaluation import prepare
from eval.quality.opened import Opened
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent

_log = logging.getLogger("kvfold")
_LESS_MEMORY = (
    "free some and repeat the command with --resume; or begin again with --overwrite and --device cpu or, with text, a shorter "
    "--calibration-context"
)


def convert(plan: Plan, evaluate: OneText | None = None, progress: Progress = silent, shared: Path | None = None) -> Conversion:
    """Write the plan's checkpoint.

    Args:
        plan: From `convert.planning`.
        evaluate: Held-out text; its perplexity goes into the model card.
        progress: Called with the progress of each stage.
        shared: A directory that keeps what is made of the source alone for other conversions; None to keep nothing.

    Raises:
        Refusal: Several processes were launched to call this.
        KvfoldError: As of `convert.output.writing.writing`.
    """
    require_alone("a conversion")
    source, settings = plan.source, EvaluationSettings(device=plan.device)
    evaluate_on = None if evaluate is None else text_of(evaluate)
    held_out = prepare([source], evaluate_on, settings)[1] if evaluate_on else None
    text = CalibrationText.read(source, plan.calibration) if plan.calibration else None
    if held_out and text:
        warn_of_overlap(held_out, text.whole, "calibration")
    inputs, heal = plan.inputs(text.hashes if text else []), {"heal": plan.calibration.heal if plan.calibration else None}
    manifest = loadable_manifest(plan)
    with writing("conversion", plan.output, [source], inputs, heal) as work:
        if work.provenance:
            return Conversion(plan, work.provenance)
        own_texts = _shared(inputs, shared) if shared else work.steps
        if text:
            text = text.with_own(written(plan, own_texts, progress))
            for remark in text.remarks(plan.channels):
                _log.warning(remark)
            if text.own is not None:
                write_own_text(work.path, text.own)
        statistics = work.steps
        if shared and text:
            surveyed, how, behind = text.surveyed(), text.calibration, ["behind norms"] if plan.reads_projections else []
            statistics = _shared(inputs, shared, surveyed.tokens.hash, how.context, how.retrieval_limit, *behind)
        job = Job(plan, manifest, work, text, progress, statistics)
        with work.kept_without_memory(plan.runs_on, _LESS_MEMORY):
            provenance = convert_layers(job)
        work.kept = True  # the weights are complete: whatever fails now, --resume goes on from them
        with Opened() as opened:
            healing = heal_result(plan, work, text.to_heal_on, progress, opened) if text else None
            others = [Sample.of(part, text.calibration.context) for part in text.others] if text else []
            check = checked(plan, work.path, others, own_texts, progress, opened) if plan.checks else None
            provenance = with_healing(provenance, healing) | {"check": check}
            if evaluate_on:
                seen = joined((text.tokens, text.to_heal_on)) if text else None
                provenance["evaluation"] = evaluated(work, provenance, evaluate_on, settings, seen, progress, opened)
        return Conversion(plan, work.complete(provenance, model_card(plan, provenance)))


def _shared(inputs: Mapping[str, Any], shared: Path, *of: Any) -> Path:
    """The directory, in one for several conversions, that keeps what depends on their source and on `of`."""
    made_from = [*(inputs[name] for name in ("model", "config", "files")), *of, inputs["device"], inputs["versions"]]
    directory = shared / hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    return directory
