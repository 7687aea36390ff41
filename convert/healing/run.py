"""Carries out the plan of a healing: load, train, write, measure, publish."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attention.models import AUTO_MAP, CODE, names_ours, provides
from convert.calibration.own_text import own_text
from convert.healing.batches import LEAST_HELD_OUT, SPARED, TrainingText
from convert.healing.card import card
from convert.healing.describe import facts, healed_text, plan_text
from convert.healing.loop import Progressed
from convert.healing.memory import disk, expected
from convert.healing.models import train
from convert.healing.plan import HealPlan
from convert.healing.provenance import provenance_of
from convert.healing.team import agreed, computes_in, join, shards
from convert.healing.texts import TrainingTexts
from convert.healing.weights import write_files
from convert.launch import is_first, launched_count
from convert.output.companions import copy_code, copy_companions, write_config, write_own_text
from convert.output.destination import CHECKPOINT, partial_path, without_text
from convert.output.evaluation import evaluated
from convert.output.provenance import versions
from convert.output.writing import Work, writing
from convert.planning.positions import limited
from convert.planning.texts import written_before
from eval.inputs.overlap import warn_of_overlap
from eval.inputs.reader import SAFETENSORS, Reader
from eval.inputs.sealed import write_whole
from eval.inputs.text import OWN_TEXT, Text
from eval.machine.device import compute_device, free_memory
from eval.quality.evaluation import prepare
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent

_log = logging.getLogger("kvfold")
_CURVE = "healing.jsonl"  # beside the weights
_LESS_MEMORY = (
    "repeat the command with --resume and --checkpointing, or a smaller --micro-batch-tokens; a shorter --context takes less, "
    "too, but begins again"
)
_OTHER = 2  # added to the seed, so that the teacher writes other text than a conversion and its check have seen


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
        """The plan's facts."""
        return facts(self.plan, self.passes)

    def __str__(self) -> str:
        return plan_text(self.plan, self.passes)


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
        return facts(self.plan, self.passes) | {"conversion": self.provenance}

    def __str__(self) -> str:
        return healed_text(self.plan, self.passes, self.provenance)


def execute(plan: HealPlan, evaluate_on: Text | None = None, progress: Progress = silent) -> Healing:
    """Write the healed checkpoint.

    Under `accelerate launch`, every process calls this: all train, the first one does everything else, and the others wait for
    its provenance.

    Args:
        plan: From `plan_heal`.
        evaluate_on: Held-out text; what it says goes into the model card, and decides nothing.
        progress: Called with the progress of each stage.

    Raises:
        KvfoldError: As of `convert.output.writing.writing`.
    """
    join(plan)
    if not is_first():
        _follow(plan, TrainingTexts.read(plan))
        return Healing(plan, agreed(None))
    settings, models = EvaluationSettings(contexts=(plan.context,), device=plan.device), [plan.teacher, plan.converted]
    held_out = prepare(models, evaluate_on, settings)[1] if evaluate_on else None
    texts = TrainingTexts.read(plan)
    if held_out:
        warn_of_overlap(held_out, filter(None, texts.parts), "training")
    with writing("healing", plan.output, models, _inputs(plan, texts)) as work:
        if work.provenance:
            agreed(None)
            return Healing(plan, agreed(work.provenance))
        provenance = _made(plan, texts, work, progress)
        if evaluate_on:
            named = {"source": plan.teacher, "converted": plan.converted}
            provenance["evaluation"] = evaluated(work, provenance, named, "healed", evaluate_on, settings, None, progress)
        work.complete(provenance, card(plan, provenance))
    return Healing(plan, agreed(work.provenance))


def _inputs(plan: HealPlan, texts: TrainingTexts) -> dict[str, Any]:
    """Everything that the result's bytes depend on."""
    ((command, options),) = plan.recipe().items()
    return {
        "command": command,
        **without_text(options),
        "device": str(compute_device(plan.device)),
        "computes_in": str(computes_in(plan)),
        "config": plan.converted.raw,
        "files": plan.converted.fingerprint,
        "teacher_files": plan.teacher.fingerprint,
        "texts": [{"hash": one["hash"], "share": one["share"]} for one in texts.facts],
        "rows_to_write": texts.rows_to_write,
        "versions": versions(),
    }


def _made(plan: HealPlan, texts: TrainingTexts, work: Work, progress: Progress) -> dict[str, Any]:
    """Write the healed checkpoint into the work directory, all but its provenance, which is returned, and its card."""
    reader = Reader(plan.converted.files)
    if any(work.training.iterdir()):
        work.keep()  # checkpoints of an earlier run outlive whatever fails in this one
    there = sum(file.stat().st_size for file in work.training.rglob("*") if file.is_file())
    work.require_space(sum(info.nbytes for info in reader.infos.values()) + max(0, disk(plan) - there))
    for note in plan.notes:
        _log.info(note)
    if plan.converted.code_note:
        _log.warning("%s; the result gets kvfold's", plan.converted.code_note)
    text = _written(plan, texts, work, progress)
    _say_what_judges(plan, text)
    _say_memory(plan)

    def kept(progressed: Progressed) -> None:
        work.keep()
        lines = [json.dumps(asdict(point)) + "\n" for point in progressed.curve]
        write_whole(work.path / _CURVE, "".join(lines).encode())

    with work.kept_without_memory(compute_device(plan.device), _LESS_MEMORY):
        agreed(work.training)
        outcome, where = train(plan, text, reader, work.training, progress, kept)
        kept(outcome.progressed)  # also of a run that took no step
    for _ in write_files(work.path, reader, outcome.weights, where, progress):
        pass
    if (index := plan.converted.files / f"{SAFETENSORS}.index.json").is_file():
        shutil.copyfile(index, work.path / index.name)
    shutil.copyfile(plan.converted.files / "config.json", work.path / "config.json")
    raw = _config(plan) if outcome.weights else plan.converted.raw
    ours = provides(plan.converted.model_type)
    copy_companions(work.path, plan.converted.files, not ours)
    if ours:
        copy_code(work.path, CODE)
        raw = raw if names_ours(raw) else raw | {"auto_map": AUTO_MAP}
    if raw != plan.converted.raw:
        write_config(work.path, raw, None)
    calibrated = plan.converted.beside(work.path).calibrated
    healed = sorted(where) if outcome.weights else []
    return provenance_of(plan, texts.facts, text, outcome, healed) | (calibrated.as_dict() if calibrated else {})


def _written(plan: HealPlan, texts: TrainingTexts, work: Work, progress: Progress) -> TrainingText:
    """The whole text, with what the teacher writes or has written, which is kept beside the weights."""
    if texts.own is not None:
        write_own_text(work.path, texts.own)
    if not (rows := texts.rows_to_write):
        return texts.known
    device, seed = compute_device(plan.device), plan.seed + _OTHER
    hint = "give another --text FILE"
    own = own_text(plan.teacher, rows, plan.context, seed, device, work.steps, progress, hint)
    write_own_text(work.path, own)
    work.keep()  # it may have taken hours
    return texts.with_own(own)


def _config(plan: HealPlan) -> dict[str, Any]:
    """The result's config.json: trained in longer blocks than it was calibrated in, it is calibrated for these."""
    before, raw = plan.converted.calibrated, plan.converted.raw
    return limited(raw, plan.context, before.of) if before and plan.context > before.positions else raw


def _say_what_judges(plan: HealPlan, text: TrainingText) -> None:
    if (tokens := len(text.held_out) * plan.context) < LEAST_HELD_OUT:
        _log.warning(
            "%d held-out tokens judge the healing, too few to tell a small gain from noise: %d are held out of a text of %d",
            tokens, LEAST_HELD_OUT, SPARED * LEAST_HELD_OUT,
        )  # fmt: skip


def _say_memory(plan: HealPlan) -> None:
    device, parts = compute_device(plan.device), launched_count() if shards() else 1
    needed, free = sum(expected(plan, parts).values()), free_memory(device)
    _log.info("takes about %.1f GB of memory on %s", needed / 1e9, device)
    if needed > free:
        _log.warning(
            "%s has %.1f GB free, and healing takes about %.1f GB; less with --checkpointing or --micro-batch-tokens",
            device, free / 1e9, needed / 1e9,
        )  # fmt: skip


def _follow(plan: HealPlan, texts: TrainingTexts) -> None:
    """The part of the other processes: the first one says where checkpoints are, or None if there is nothing to train."""
    text = texts.known
    if (checkpoints := agreed(None)) is None:
        return
    if rows := texts.rows_to_write:  # the first process has written them
        file = partial_path(plan.output.path) / CHECKPOINT / OWN_TEXT
        text = texts.with_own(written_before(plan.teacher, file, rows, plan.context))
    train(plan, text, Reader(plan.converted.files), checkpoints, silent)
