"""The course of a healing: both models, a learning rate, then steps, points of the curve and checkpoints, to the end."""

import contextlib
import logging
import math
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from attention.encoded_forward import rounding_cache
from attention.errors import Failure
from attention.patch import pad_values
from convert.healing.loss import Distillation
from convert.healing.plan import HealPlan
from convert.healing.team import computes_in, place, shards
from convert.healing.texts import TrainingText
from convert.healing.trainable import Trainable, compute_layers_again
from convert.healing.trainer import OPTIMIZER, WEIGHTS, HealingTrainer, NotFinite, checkpoint_in, share, tracker
from eval.inputs.loading import load
from eval.inputs.reader import Reader
from eval.inputs.sealed import checksum, seal, sync_tree, unchanged, unsealed
from eval.machine.device import compute_device
from eval.quality.opened import Opening
from eval.terminal.progress import Progress, stage

_log = logging.getLogger("kvfold")
_EXACT = 1e-6  # nats of KL: what arithmetic in fp32 leaves
_PATIENCE = 4  # points without a new best one
_RATIO, _ALIKE = 3, 1.1  # of a rate to the one below; times the smallest KL
# In a checkpoint: what this process has written beside weights and optimizer, and the checksums of all.
_BESIDE, _SEAL = ("trainer_state.json", "scheduler.pt", "rng_state.pth", "rng_state_0.pth"), "sealed.json"


@dataclass(frozen=True)
class Point:
    """One point of the curve: what held-out blocks say after some steps.

    Attributes:
        step: Steps taken.
        tokens: Tokens seen.
        rate: The learning rate of the last step.
        train_loss: Mean loss of the steps since the last point; None before the first step.
        kl: Mean KL to the teacher on the held-out blocks.
        loss_nats: Mean loss over the teacher's there.
    """

    step: int
    tokens: int
    rate: float
    train_loss: float | None
    kl: float
    loss_nats: float


@dataclass
class Progressed:
    """How far a healing is.

    Attributes:
        rate: The learning rate that was chosen.
        tried: What each rate reached: its mean KL on the held-out blocks.
        curve: The points so far, from before the first step on.
    """

    rate: float
    tried: dict[str, float]
    curve: list[Point]

    @property
    def best(self) -> Point:
        """The point with the smallest KL."""
        return min(self.curve, key=lambda point: point.kl)

    @property
    def step(self) -> int:
        """Steps taken."""
        return self.curve[-1].step

    @property
    def is_stale(self) -> bool:
        """Whether the last points brought no new best one.

        The first point does not count: a high rate loses at first, and gains more than that later.
        """
        distances = [point.kl for point in self.curve[1:]]
        return bool(distances) and len(distances) - 1 - distances.index(min(distances)) >= _PATIENCE


@dataclass(frozen=True)
class Outcome:
    """The weights that a healing chose, and how it came to them.

    Attributes:
        progressed: The rate and the curve.
        after: The point of the weights as they are written.
        weights: These, by their names in the checkpoint; empty if those of the converted one stay.
    """

    progressed: Progressed
    after: Point
    weights: dict[str, torch.Tensor]


def train(
    plan: HealPlan, text: TrainingText, reader: Reader, checkpoints: Path, progress: Progress, opening: Opening = load
) -> Outcome:
    """Train the student, from its last checkpoint on. Every process calls this.

    Args:
        plan: The plan.
        text: The text to train on.
        reader: Reads the converted checkpoint.
        checkpoints: The directory of the Trainer's checkpoints.
        progress: Called with the tokens seen.
        opening: Loads the models.

    Raises:
        Failure: A loss is not finite, or a weight overflows in the dtype that it is written in.
    """
    with distillation_of(plan, opening) as (module, what):
        trainer = HealingTrainer(plan, text, module, what, checkpoints)
        outcome, accelerator = _healed(plan, trainer, reader, progress), trainer.accelerator
        del trainer
        accelerator.free_memory()
    return outcome


@contextlib.contextmanager
def distillation_of(plan: HealPlan, opening: Opening = load) -> Iterator[tuple[Distillation, Trainable]]:
    """Both models in memory with the loss, and what trains of the student.

    The student is in fp32, and only what trains has gradients: these parameters, or LoRA beside them. The teacher is the source
    itself.
    """
    kept = plan.teacher.dtype if shards() and compute_device(plan.device).type == "cuda" else "auto"
    where = place(plan)
    with opening(plan.teacher, kept, where) as teacher, opening(plan.converted, "float32", where) as student:
        for model in (teacher, student):
            pad_values(model.requires_grad_(False))
        what = Trainable(student, plan.names, plan.lora_rank, plan.seed)
        if plan.options.checkpointing:
            compute_layers_again(student)
        cache = None if plan.rounding is None else partial(rounding_cache, plan.rounding, plan.spec)
        yield Distillation(student, teacher, plan.converted.vocabulary, cache, computes_in(plan)), what


def _healed(plan: HealPlan, trainer: HealingTrainer, reader: Reader, progress: Progress) -> Outcome:
    """Choose a learning rate, and train until the steps are done or gain nothing any more."""
    progressed = _last(Path(trainer.args.output_dir))
    if progressed is None:
        start = _told(Point(0, 0, 0.0, None, *trainer.measure()))
        if start.kl <= _EXACT:
            _log.warning("%s loses nothing: its KL to %s is %.1e", plan.converted.name, plan.teacher.name, start.kl)
            return Outcome(Progressed(0.0, {}, [start]), start, {})
        progressed = Progressed(*_chosen(plan, trainer, start, progress), [start])
    if progressed.step < plan.steps and not progressed.is_stale:
        trainer.add_callback(_Course(plan, progressed))
        if plan.options.track is not None:
            trainer.add_callback(tracker(plan))
        with stage(progress, "heal", plan.tokens, "token") as done:
            done(progressed.curve[-1].tokens)
            trainer.run(plan.steps, progressed.rate, done, progressed.step)
        trainer.remove_callback(_Course)
    if progressed.step < plan.steps:
        best, last = progressed.best.step, progressed.step
        _log.info("no gain since step %d: stopped after step %d of %d", best, last, plan.steps)
    return _outcome(trainer, progressed, reader)


def _outcome(trainer: HealingTrainer, progressed: Progressed, reader: Reader) -> Outcome:
    """The best weights, rounded as they will be written, and measured so."""
    start, best = progressed.curve[0], progressed.best
    if best.step:
        written, of = trainer.written(best.step), trainer.plan.tensors
        rounded = {name: written[of[name]].to(reader.infos[name].dtype) for name in of if of[name] in written}
        for name, weight in rounded.items():
            if not bool(weight.isfinite().all()):
                kind = str(weight.dtype).removeprefix("torch.")
                raise Failure(
                    f"{name} overflows in {kind}, in which the converted checkpoint is stored",
                    hint="convert with --dtype bfloat16 or float32, and heal that",
                )
        trainer.put({of[name]: weight.float() for name, weight in rounded.items()})
        kl, loss_nats = trainer.measure()
        if kl < start.kl:
            return Outcome(progressed, replace(best, kl=kl, loss_nats=loss_nats), rounded)
    _log.warning("healing gained nothing on held-out blocks: the weights stay as they are")
    return Outcome(progressed, start, {})


def _chosen(plan: HealPlan, trainer: HealingTrainer, start: Point, progress: Progress) -> tuple[float, dict[str, float]]:
    """The learning rate that gains most within a few steps, and what each reached.

    While the best is the largest or the smallest that was tried, another one beyond it is tried, too.
    """
    rates, weights, tried = plan.rates(start.loss_nats), trainer.weights(), dict[float, float]()
    if len(rates) == 1:
        return rates[0], {}
    while rates:
        rate = rates.pop(0)
        try:
            with stage(progress, "try rates", plan.trial_steps * plan.batch * plan.context, "token") as done:
                trainer.run(plan.trial_steps, rate, done)
                tried[rate], _ = trainer.measure()
        except NotFinite:  # a rate that is far too high
            tried[rate] = math.inf
        trainer.restore(weights)
        if not rates and len(tried) < plan.most_rates:  # nothing more, where others lie around the best
            beyond = {max(tried): max(tried) * _RATIO, min(tried): min(tried) / _RATIO}
            rates = [further for edge, further in beyond.items() if edge == _largest(tried)]
    best = _largest(tried)
    if best is None:
        listed = ", ".join(f"{rate:.1e}" for rate in tried)
        raise Failure(
            f"the loss is not finite after {plan.trial_steps} steps at any learning rate of {listed}",
            hint="give a smaller one with --lr",
        )
    named = {f"{rate:.2e}": kl for rate, kl in tried.items() if kl < math.inf}
    listed = ", ".join(f"{name} (KL {kl:.4f})" for name, kl in named.items())
    _log.info("learning rate %.2e of %s", best, listed)
    return float(f"{best:.2e}"), named


def _largest(tried: dict[float, float]) -> float | None:
    """The largest rate that is about as good as the best: what a short trial finds best is too small for a long training."""
    least = min(tried.values())
    return max((rate for rate, kl in tried.items() if kl <= _ALIKE * least), default=None) if least < math.inf else None


@dataclass
class _Course(TrainerCallback):  # type: ignore[misc]
    """Asks the Trainer for points of the curve, ends the training, and seals its checkpoints with the progress."""

    plan: HealPlan
    progressed: Progressed

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        at_point = state.global_step % self.plan.every == 0 or state.global_step == self.plan.steps
        control.should_evaluate = control.should_save = at_point
        control.should_log = at_point or self.plan.options.track is not None

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict[str, float], **named: Any
    ) -> None:
        step, logged = state.global_step, [one for one in state.log_history if one["step"] > self.progressed.step]
        losses = [one["loss"] for one in logged if "loss" in one]
        rate, tokens = self.progressed.rate * share(step - 1, self.plan.steps), step * self.plan.batch * self.plan.context
        point = Point(step, tokens, rate, sum(losses) / len(losses), metrics["eval_kl"], metrics["eval_loss_nats"])
        self.progressed.curve.append(_told(point))
        control.should_training_stop |= self.progressed.is_stale

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **named: Any) -> None:
        if args.should_save:
            last, best = (checkpoint_in(args.output_dir, step) for step in (state.global_step, self.progressed.best.step))
            _seal(last, self.progressed)
            for old in last.parent.glob("checkpoint-*"):
                if old not in (last, best):
                    shutil.rmtree(old, ignore_errors=True)


def _seal(checkpoint: Path, progressed: Progressed) -> None:
    """Write down what a checkpoint holds, once that is on disk: without this it does not count."""
    sync_tree(checkpoint)
    names = [WEIGHTS, OPTIMIZER, *(name for name in _BESIDE if (checkpoint / name).exists())]
    files = {name: checksum(checkpoint / name) for name in names}
    seal(checkpoint / _SEAL, {"files": files, "progressed": asdict(progressed)})


def _last(directory: Path) -> Progressed | None:
    """The progress at the last checkpoint that is whole, beside that of its best point."""
    steps = (int(seal.parent.name.split("-")[1]) for seal in directory.glob(f"checkpoint-*/{_SEAL}"))
    for checkpoint in (checkpoint_in(directory, step) for step in sorted(steps, reverse=True)):
        progressed = _unsealed(checkpoint)
        if progressed and (not progressed.best.step or _unsealed(checkpoint_in(directory, progressed.best.step))):
            return progressed
        _log.warning("%s is damaged, so training goes on from an earlier one, or begins again", checkpoint)
    return None


def _unsealed(checkpoint: Path) -> Progressed | None:
    """The progress at a checkpoint; None if a file of it is not as it was written."""
    noted = unsealed(checkpoint / _SEAL)
    if noted is None or not unchanged(checkpoint, noted["files"]):
        return None
    saved = noted["progressed"]
    return Progressed(saved["rate"], saved["tried"], [Point(**point) for point in saved["curve"]])


def _told(point: Point) -> Point:
    said = "step %d: KL %.4f, %+.4f nats over the teacher on held-out blocks"
    _log.info(said, point.step, point.kl, point.loss_nats)
    return point
