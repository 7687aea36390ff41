"""How many tokens a healing trains on within a time, by a few of its steps."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from attention.errors import Refusal
from convert.healing.loop import distillation_of
from convert.healing.loss import Distillation
from convert.healing.plan import HealPlan
from convert.healing.texts import TrainingTexts
from convert.launch import launched_count
from convert.output.destination import INPUTS, Output, partial_path, read_provenance
from eval.inputs.sealed import read_object
from eval.machine.clock import timed
from eval.machine.device import compute_device, memory_for
from eval.terminal.progress import Progress, stage

_ROUNDS, _STEPS = 3, 3  # each round times steps of the size that follows from the round before


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


def _paces(plan: HealPlan, module: Distillation) -> tuple[float, float]:
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
