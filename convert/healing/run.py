"""Carries out the plan of a healing: load, train, write, measure, publish. Before that, says how many tokens a time allows."""

import logging
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from attention.errors import Refusal
from convert.healing.describe import Healing, card, provenance_of
from convert.healing.loop import distillation_of, train
from convert.healing.plan import HealPlan
from convert.healing.team import agreed, computes_in, join, shards
from convert.healing.texts import TrainingTexts
from convert.healing.weights import write_beside, write_files
from convert.launch import is_first, launched_count
from convert.output.destination import INPUTS, Output, partial_path, read_provenance, versions, without_text
from convert.output.evaluation import evaluated
from convert.output.writing import Work, writing
from eval.inputs.reader import Reader
from eval.inputs.sealed import read_object
from eval.inputs.text import Text, warn_of_overlap
from eval.machine.device import compute_device, free_memory, memory_for, timed
from eval.quality.evaluation import prepare
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent, stage

_log = logging.getLogger("kvfold")
_ROUNDS, _STEPS = 3, 3  # each round times steps of the size that follows from the round before
_LESS_MEMORY = (
    "repeat the command with --resume and --checkpointing, or a smaller --micro-batch-tokens; a shorter --context takes less, "
    "too, but begins again"
)


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
    provenance = _lead(plan, evaluate_on, progress) if is_first() else _follow(plan)
    return Healing(plan, float(provenance["healing"]["passes"]), provenance)


def _lead(plan: HealPlan, evaluate_on: Text | None, progress: Progress) -> dict[str, Any]:
    """The part of the first process."""
    settings, models = EvaluationSettings(contexts=(plan.context,), device=plan.device), [plan.teacher, plan.converted]
    held_out = prepare(models, evaluate_on, settings)[1] if evaluate_on else None
    texts = TrainingTexts.read(plan)
    if held_out:
        warn_of_overlap(held_out, [part for part in texts.parts if len(part.ids)], "training")
    with writing("healing", plan.output, models, _inputs(plan, texts)) as work:
        if work.provenance:
            agreed(None)
        else:
            provenance = _made(plan, texts, work, progress)
            if evaluate_on:
                provenance["evaluation"] = evaluated(work, provenance, evaluate_on, settings, None, progress)
            work.complete(provenance, card(plan, provenance))
    return dict(agreed(work.provenance))


def _inputs(plan: HealPlan, texts: TrainingTexts) -> dict[str, Any]:
    """Everything that the result's bytes depend on."""
    return {
        "command": "heal",
        **without_text(plan.recipe()),
        "device": str(compute_device(plan.device)),
        "computes_in": str(computes_in(plan)),
        "config": plan.converted.raw,
        "files": plan.converted.fingerprint,
        "teacher_files": plan.teacher.fingerprint,
        "texts": [one["hash"] for one in texts.facts],
        "rows_to_write": texts.rows_to_write,
        "versions": versions(),
    }


def _made(plan: HealPlan, texts: TrainingTexts, work: Work, progress: Progress) -> dict[str, Any]:
    """Write the healed checkpoint into the work directory, all but its provenance, which is returned, and its card."""
    reader = Reader(plan.converted.files)
    for one, other in pairwise(sorted(plan.tensors, key=plan.tensors.__getitem__)):
        if plan.tensors[one] == plan.tensors[other] and not torch.equal(reader[one], reader[other]):
            raise Refusal(
                f"config.json ties {one} and {other}, which differ: transformers runs both, and one would be overwritten",
                hint="set tie_word_embeddings to false, or use --train attention",
            )
    there = sum(file.stat().st_size for file in work.training.rglob("*") if file.is_file())
    if there:
        work.kept = True  # checkpoints of an earlier run outlive whatever fails in this one
    work.require_space(sum(info.nbytes for info in reader.infos.values()) + max(0, plan.disk - there))
    if plan.converted.code_note:
        _log.warning("%s; the result gets kvfold's", plan.converted.code_note)
    text = texts.written(work, progress)
    device = compute_device(plan.device)
    needed, free = sum(plan.memory(launched_count() if shards() else 1).values()), free_memory(device)
    _log.info("takes %.1f GB of memory on %s, and activations", needed / 1e9, device)
    if needed > free:
        _log.warning(
            "%s has %.1f GB free, and healing takes %.1f GB without activations; less with --train lora",
            device, free / 1e9, needed / 1e9,
        )  # fmt: skip
    with work.kept_without_memory(device, _LESS_MEMORY):
        agreed(work.training)
        try:
            outcome = train(plan, text, reader, work.training, progress)
        finally:
            if any(work.training.iterdir()):
                work.kept = True
    dict(write_files(work.path, reader, outcome.weights, progress))
    calibrated = write_beside(work.path, plan.converted, plan.context if outcome.weights else 0)
    return provenance_of(plan, texts.facts, text, outcome) | (calibrated.as_dict() if calibrated else {})


def _follow(plan: HealPlan) -> dict[str, Any]:
    """The part of the other processes: the first one says where checkpoints are, or None if there is nothing to train."""
    texts = TrainingTexts.read(plan)
    if checkpoints := agreed(None):
        train(plan, texts.written_by_first(), Reader(plan.converted.files), checkpoints, silent)
    return dict(agreed(None))


def within(plan: HealPlan, seconds: float, progress: Progress) -> HealPlan:
    """The plan with the tokens that train for about so long here: its steps, and the measurements between them.

    Loading, text that the teacher writes, and an evaluation come on top. A healing that is resumed keeps the tokens that it was
    begun with, however fast its steps are now.

    Args:
        plan: Of any number of tokens.
        seconds: The time.
        progress: Called with the number of steps that are timed.

    Raises:
        Refusal: The shortest healing takes longer, or several processes would decide.
        Failure: A text cannot be read or is too short, or memory does not suffice.
    """
    if plan.output.resume and (sizes := _begun(plan.output)):
        tokens, batch_tokens = sizes
        return replace(plan, asked=tokens, options=replace(plan.options, batch_tokens=batch_tokens))
    if (count := launched_count()) > 1:
        raise Refusal(
            f"{count} processes would each time steps of their own",
            hint="give --tokens; --time TIME --dry-run in one process says how many",
        )
    shortest = plan = replace(plan, asked=1)  # one step
    texts = TrainingTexts.read(plan)
    room = memory_for("steps of the healing", "give --checkpointing, a smaller --micro-batch-tokens or a shorter --context")
    with room, distillation_of(plan) as (module, _), stage(progress, "time steps", _ROUNDS * _STEPS, "step") as done:
        for _ in range(_ROUNDS):
            training, measuring = _paces(plan, module)
            taken = _seconds(plan, texts, training, measuring)
            if plan is shortest and taken > seconds:
                raise Refusal(
                    f"a healing of {plan.tokens} tokens takes {taken:.2g} seconds here, longer than --time allows",
                    hint="give more time, or another --device",
                )
            plan = replace(plan, asked=max(shortest.tokens, int(plan.tokens + (seconds - taken) / training)))
            done(_STEPS)
    return plan


def _begun(output: Output) -> tuple[int, int] | None:
    """All tokens, and those of a step, of the healing that `--resume` goes on with; None if there is none."""
    finished = {} if output.overwrite else read_provenance(output.path)
    match read_object(partial_path(output.path) / INPUTS) or finished.get("recipe"):
        case {"tokens": int(tokens), "batch_tokens": int(batch)}:
            return tokens, batch
        case {"heal": {"tokens": int(tokens), "batch_tokens": int(batch)}}:
            return tokens, batch
    return None


def _paces(plan: HealPlan, module: torch.nn.Module) -> tuple[float, float]:
    """The seconds of a token in a step, but for the optimiser's part, and in a measurement."""
    device = compute_device(plan.device)
    ids = torch.zeros(plan.micro_batch, plan.context, dtype=torch.int64, device=device)
    works = (lambda: module(ids).backward()), torch.no_grad()(lambda: module(ids, measures=True))
    runs = (timed(device, work, module.zero_grad, 1 + _STEPS) for work in works)
    training, measuring = (statistics.median(seconds[1:]) / ids.numel() for seconds in runs)  # the first one is slower
    return training, measuring


def _seconds(plan: HealPlan, texts: TrainingTexts, training: float, measuring: float) -> float:
    """How long a plan trains, at these seconds per token; where rates are tried, the fewest that may be."""
    rates = len(plan.rates(0.0)) if plan.trial_steps else 0
    steps = plan.steps + rates * plan.trial_steps
    points = 2 + -(-plan.steps // plan.every) + rates
    held_out = len(replace(texts, plan=plan).whole().held_out)
    return plan.context * (steps * plan.batch * training + points * held_out * measuring)
