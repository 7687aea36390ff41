"""How many tokens a healing has time for: a few of its steps are timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from attention.errors import Refusal
from convert.healing.models import running, student_of, trainer_of
from convert.healing.plan import HealPlan
from convert.healing.student import trained
from convert.healing.team import Team
from convert.healing.texts import TrainingTexts
from convert.healing.training import Schedule, Trainer
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
    with _opened(plan, texts) as trainer, stage(progress, "time steps", _ROUNDS * _STEPS, "step") as done:
        for _ in range(_ROUNDS):
            per_token, measurement = _paces(plan, trainer)
            taken = _seconds(plan, texts, per_token, measurement)
            if plan is shortest and taken > seconds:
                raise Refusal(
                    f"a healing of {plan.tokens} tokens takes {taken:.2g} seconds here, longer than --time allows",
                    hint="give more time, or another --device",
                )
            plan = sized(max(shortest.tokens, _rounded(plan.tokens + (seconds - taken) / per_token)))
            done(_STEPS)
    return plan.tokens


@contextmanager
def _opened(plan: HealPlan, texts: TrainingTexts) -> Iterator[Trainer]:
    """A trainer with both models in memory, even if the plan keeps what the teacher says on disk."""
    team = Team.of(plan)
    room = memory_for("steps of the healing", "give --checkpointing, a smaller --micro-batch-tokens or a shorter --context")
    with room, running(plan, team.device) as teacher, student_of(plan, team.device) as student:
        names = trained(student, plan.family, plan.spec.num_layers, plan.options.train)
        yield trainer_of(plan, texts.known, student, teacher, names, team)
        team.accelerator.free_memory()


def _paces(plan: HealPlan, trainer: Trainer) -> tuple[float, float]:
    """The seconds of a token in a step of one forward pass, and of one measurement on the held-out blocks of the trainer."""
    device, schedule = compute_device(plan.device), Schedule(1, plan.micro_batch, plan.micro_batch, 0.0, plan.seed)
    _, *steps = timed(device, partial(trainer.step, 0, schedule), _nothing, 1 + _STEPS)  # the first one is slower
    (measurement,) = timed(device, trainer.measure, _nothing, 1)
    return statistics.median(steps) / (plan.micro_batch * plan.context), measurement


def _nothing() -> None:
    """Nothing precedes a step."""


def _seconds(plan: HealPlan, texts: TrainingTexts, per_token: float, measurement: float) -> float:
    """How long a plan trains."""
    rates = _RATES if plan.trial_steps else 0
    steps = plan.steps + rates * plan.trial_steps
    points = 2 + -(-plan.steps // plan.every) + rates
    blocks, timed_blocks = (len(one.known.held_out) for one in (replace(texts, plan=plan), texts))
    return steps * plan.batch * plan.context * per_token + points * measurement * blocks / timed_blocks


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
