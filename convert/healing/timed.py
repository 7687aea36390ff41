"""How many tokens a healing has time for: a few of its steps are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from attention.errors import Refusal
from convert.healing.models import distillation_of, student_of, teacher_of
from convert.healing.plan import HealPlan
from convert.healing.student import trained
from convert.healing.texts import TrainingTexts
from convert.healing.trainer import Distillation
from convert.launch import launched_count
from convert.output.destination import Output, begun, read_provenance
from eval.machine.clock import timed
from eval.machine.device import compute_device, memory_for
from eval.terminal.progress import Progress, stage

_ROUNDS, _STEPS = 3, 3  # each round times steps of the size that follows from the round before
_RATES = 3  # that are tried at least, where any are
_DIGITS = 3  # of the number of tokens


def tokens_within(seconds: float, sized: Callable[[int], HealPlan], progress: Progress) -> int:
    """The tokens of a healing that trains for about so long here: its steps, and the measurements between them.

    Loading, text that the teacher writes, and an evaluation come on top.

    Args:
        seconds: The time.
        sized: Maps a number of tokens to the plan.
        progress: Called with the number of steps that are timed.

    Raises:
        Refusal: The shortest healing takes longer, or several processes would decide.
        Failure: A text cannot be read or is too short, or memory does not suffice.
    """
    if (count := launched_count()) > 1:
        raise Refusal(
            f"{count} processes would each time steps of their own",
            hint="give --tokens; --time TIME --dry-run in one process says how many",
        )
    shortest = plan = sized(1)  # of one step
    texts = TrainingTexts.read(plan)
    with _opened(plan) as module, stage(progress, "time steps", _ROUNDS * _STEPS, "step") as done:
        for _ in range(_ROUNDS):
            training, measuring = _paces(plan, module)
            taken = _seconds(plan, texts, training, measuring)
            if plan is shortest and taken > seconds:
                raise Refusal(
                    f"a healing of {plan.tokens} tokens takes {taken:.2g} seconds here, longer than --time allows",
                    hint="give more time, or another --device",
                )
            plan = sized(max(shortest.tokens, _rounded(plan.tokens + (seconds - taken) / training)))
            done(_STEPS)
    return plan.tokens


@contextmanager
def _opened(plan: HealPlan) -> Iterator[Distillation]:
    """Both models in memory."""
    room = memory_for("steps of the healing", "give --checkpointing, a smaller --micro-batch-tokens or a shorter --context")
    with room, teacher_of(plan) as teacher, student_of(plan) as student:
        names = trained(student, plan.family, plan.spec.num_layers, plan.options.train)
        yield distillation_of(plan, student, teacher, names)[0]


def _paces(plan: HealPlan, module: Distillation) -> tuple[float, float]:
    """The seconds of a token in a step, but for the optimiser's part, and in a measurement."""
    device = compute_device(plan.device)
    ids = torch.zeros(plan.micro_batch, plan.context, dtype=torch.int64, device=device)

    def step() -> None:
        module(ids).backward()

    def measure() -> None:
        with torch.no_grad():
            module(ids, measures=True)

    _, *steps = timed(device, step, module.zero_grad, 1 + _STEPS)  # the first one is slower
    _, *measurements = timed(device, measure, module.zero_grad, 1 + _STEPS)
    return statistics.median(steps) / ids.numel(), statistics.median(measurements) / ids.numel()


def _seconds(plan: HealPlan, texts: TrainingTexts, training: float, measuring: float) -> float:
    """How long a plan trains, at these seconds per token."""
    rates = _RATES if plan.trial_steps else 0
    steps = plan.steps + rates * plan.trial_steps
    points = 2 + -(-plan.steps // plan.every) + rates
    held_out = len(replace(texts, plan=plan).known.held_out)
    return plan.context * (steps * plan.batch * training + points * held_out * measuring)


def _rounded(tokens: float) -> int:
    """Down to a few digits."""
    unit = 10 ** max(0, len(str(int(tokens))) - _DIGITS)
    return int(tokens) // unit * unit


def tokens_of_begun(output: Output) -> int | None:
    """Those of the healing that `--resume` goes on with, however fast its steps are now; None if there is none."""
    recipe = {} if output.overwrite else read_provenance(output.path).get("recipe")
    finished = recipe.get("heal") if isinstance(recipe, dict) else None
    found = begun(output.path) or finished
    tokens = found.get("tokens") if isinstance(found, dict) else None
    return tokens if isinstance(tokens, int) else None
