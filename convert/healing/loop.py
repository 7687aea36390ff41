"""The course of a healing: the choice of a learning rate, then steps, points of the curve and states, to the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from attention.errors import Failure
from convert.healing.plan import RATIO, HealPlan
from convert.healing.states import Progressed, States
from convert.healing.training import NotFinite, Point, Trainer
from eval.terminal.progress import Progress, stage

_log = logging.getLogger("kvfold")
_EXACT = 1e-6  # nats of KL: what arithmetic in fp32 leaves
_PATIENCE = 4  # points without a new best one
_ALIKE = 1.1  # times the smallest KL


@dataclass(frozen=True)
class Outcome:
    """The weights that a healing chose, and how it came to them.

    Attributes:
        progressed: The rate and the curve.
        after: The point of the weights as they are written.
        weights: These, by name; empty if those of the converted checkpoint stay.
    """

    progressed: Progressed
    after: Point
    weights: dict[str, torch.Tensor]


def healed(
    plan: HealPlan,
    trainer: Trainer,
    states: States,
    stored: Mapping[str, torch.dtype],
    kept: Callable[[Progressed], object],
    progress: Progress,
) -> Outcome:
    """Choose a learning rate, and train until the steps are done or gain nothing any more.

    Args:
        plan: The plan.
        trainer: Of the student; with a state on disk, it goes on from there.
        states: Where states are kept.
        stored: The dtype that each parameter is written in, by its name.
        kept: Called after each state is saved, with the progress.
        progress: Called with the tokens seen.

    Raises:
        Failure: A loss is not finite, or a weight overflows in the dtype that it is written in.
    """
    progressed = states.load()
    if progressed is None:
        start = _point(trainer, 0, 0.0, None)
        if start.kl <= _EXACT:
            _tell(
                trainer,
                logging.WARNING,
                f"{plan.converted.name} loses nothing: its KL to {plan.teacher.name} is {start.kl:.1e}",
            )
            return Outcome(Progressed(0.0, {}, [start]), start, {})
        rate, tried = _chosen(plan, trainer, start, progress)
        progressed = Progressed(rate, tried, [start])
    schedule = replace(trainer.schedule, rate=progressed.rate)
    per_step = plan.batch * plan.context
    with stage(progress, "heal", plan.tokens, "token") as done:
        if progressed.step:
            done(progressed.step * per_step)
        losses: list[float] = []
        while progressed.step < plan.steps and not _stale(progressed):
            losses.append(trainer.step(progressed.step, schedule))
            progressed.step += 1
            done(per_step)
            trainer.accelerator.log({"train/loss": losses[-1]}, step=progressed.step * per_step)
            if progressed.step % plan.every and progressed.step < plan.steps:
                continue
            rate_now = schedule.rate * schedule.share(progressed.step - 1)
            point = _point(trainer, progressed.step, rate_now, sum(losses) / len(losses), per_step)
            losses = []
            progressed.curve.append(point)
            states.save(progressed)
            kept(progressed)
    if progressed.step < plan.steps:
        stopped = f"stopped after step {progressed.step} of {plan.steps}"
        _tell(trainer, logging.INFO, f"no gain since step {progressed.best.step}: {stopped}")
    return _outcome(trainer, progressed, states, stored)


def _outcome(trainer: Trainer, progressed: Progressed, states: States, stored: Mapping[str, torch.dtype]) -> Outcome:
    """The best weights, rounded as they will be written, and measured so."""
    start, best = progressed.curve[0], progressed.best
    if best.step:
        rounded = {name: weight.to(stored[name]) for name, weight in trainer.written(states.best(best.step)).items()}
        for name, weight in rounded.items():
            if not bool(weight.isfinite().all()):
                kind = str(weight.dtype).removeprefix("torch.")
                raise Failure(
                    f"{name} overflows in {kind}, in which the converted checkpoint is stored",
                    hint="convert with --dtype bfloat16 or float32, and heal that",
                )
        trainer.put({name: weight.float() for name, weight in rounded.items()})
        sums = trainer.measure()
        after = replace(best, kl=sums.mean_kl, loss_nats=sums.mean_loss)
        if after.kl < start.kl:
            return Outcome(progressed, after, rounded)
    _tell(trainer, logging.WARNING, "healing gained nothing on held-out blocks: the weights stay as they are")
    return Outcome(progressed, start, {})


def _stale(progressed: Progressed) -> bool:
    """Whether the last points brought no new best one.

    The first point does not count: a high rate loses at first, and gains more than that later.
    """
    found = [point.kl for point in progressed.curve[1:]]
    return bool(found) and len(found) - 1 - found.index(min(found)) >= _PATIENCE


def _chosen(plan: HealPlan, trainer: Trainer, start: Point, progress: Progress) -> tuple[float, dict[str, float]]:
    """The learning rate that gains most within a few steps, and what each reached.

    While the best is the largest or the smallest that was tried, another one beyond it is tried, too.
    """
    rates = plan.rates(start.loss_nats)
    if len(rates) == 1:
        return rates[0], {}
    weights, tried = trainer.weights(), dict[float, float]()
    for rate in rates:
        tried[rate] = _tried(plan, trainer, rate, progress)
        trainer.restore(weights)
    while len(tried) < plan.most_rates and (further := _beyond(tried)):
        tried[further] = _tried(plan, trainer, further, progress)
        trainer.restore(weights)
    best = _largest(tried)
    if best is None:
        listed = ", ".join(f"{rate:.1e}" for rate in tried)
        raise Failure(
            f"the loss is not finite after {plan.trial_steps} steps at any learning rate of {listed}",
            hint="give a smaller one with --lr",
        )
    named = {f"{rate:.2e}": kl for rate, kl in tried.items() if kl < math.inf}
    listed = ", ".join(f"{name} (KL {kl:.4f})" for name, kl in named.items())
    _tell(trainer, logging.INFO, f"learning rate {best:.2e} of {listed}")
    return float(f"{best:.2e}"), named


def _tried(plan: HealPlan, trainer: Trainer, rate: float, progress: Progress) -> float:
    """The KL on held-out blocks after a short training at this rate; infinite where it does not stay finite."""
    schedule, per_step = replace(trainer.schedule, rate=rate, steps=plan.trial_steps), plan.batch * plan.context
    try:
        with stage(progress, "try rates", plan.trial_steps * per_step, "token") as done:
            for step in range(plan.trial_steps):
                trainer.step(step, schedule)
                done(per_step)
            return trainer.measure().mean_kl
    except NotFinite:  # a rate that is far too high
        return math.inf


def _beyond(tried: dict[float, float]) -> float | None:
    """The rate to try next: beyond the best one, if that is the largest or the smallest; None where others lie around it."""
    best = _largest(tried)
    return {max(tried): max(tried) * RATIO, min(tried): min(tried) / RATIO}.get(best) if best else None


def _largest(tried: dict[float, float]) -> float | None:
    """The largest rate that is about as good as the best: what a short trial finds best is too small for a long training."""
    least = min(tried.values())
    return max((rate for rate, kl in tried.items() if kl <= _ALIKE * least), default=None) if least < math.inf else None


def _point(trainer: Trainer, step: int, rate: float, train_loss: float | None, per_step: int = 0) -> Point:
    sums = trainer.measure()
    point = Point(step, step * per_step, rate, train_loss, sums.mean_kl, sums.mean_loss)
    held_out = {"held_out/kl": point.kl, "held_out/loss_nats": point.loss_nats, "train/rate": rate}
    trainer.accelerator.log(held_out, step=point.tokens)
    found = f"KL {point.kl:.4f}, {point.loss_nats:+.4f} nats over the teacher on held-out blocks"
    _tell(trainer, logging.INFO, f"step {step}: {found}")
    return point


def _tell(trainer: Trainer, level: int, message: str) -> None:
    """Log a message, if this is the process that does."""
    if trainer.leads:
        _log.log(level, message)
