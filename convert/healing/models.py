"""The two models of a healing, the student and its teacher, and its training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attention.encoded_forward import rounding_cache
from attention.padding import pad_values
from convert.healing.batches import TrainingText
from convert.healing.loop import Outcome, Progressed, healed
from convert.healing.plan import HealPlan
from convert.healing.student import compute_layers_again, trained, without_dropout
from convert.healing.team import computes_in, place, shards
from convert.healing.trainable import Adapted, Trainable
from convert.healing.trainer import Distillation, HealingTrainer
from convert.healing.weights import held_parameters
from eval.inputs.loading import load
from eval.inputs.reader import Reader
from eval.machine.device import compute_device
from eval.terminal.progress import Progress


def train(
    plan: HealPlan,
    text: TrainingText,
    reader: Reader,
    checkpoints: Path,
    progress: Progress,
    kept: Callable[[Progressed], object] = lambda progressed: None,
) -> tuple[Outcome, dict[str, str]]:
    """Train the student, from its last checkpoint on. Every process calls this.

    Args:
        plan: The plan.
        text: The text to train on.
        reader: Reads the converted checkpoint.
        checkpoints: The directory of the Trainer's checkpoints.
        progress: Called with the tokens seen.
        kept: As of `healed`.

    Returns:
        The outcome, and the trained parameter that each tensor to write holds.
    """
    with teacher_of(plan) as teacher, student_of(plan) as student:
        names = trained(student, plan.family, plan.spec.num_layers, plan.options.train)
        where = held_parameters(student, reader, names)  # before LoRA gives parameters other names
        stored = {parameter: reader.infos[name].dtype for name, parameter in where.items()}
        trainer = trainer_of(plan, text, student, teacher, names, checkpoints)
        outcome, accelerator = healed(plan, trainer, stored, kept, progress), trainer.accelerator
        del trainer
        accelerator.free_memory()
    return outcome, where


@contextlib.contextmanager
def student_of(plan: HealPlan) -> Iterator[Any]:
    """The student in fp32, without gradients yet."""
    with load(plan.converted, "float32", place(plan)) as model:
        yield pad_values(without_dropout(model).requires_grad_(False))


@contextlib.contextmanager
def teacher_of(plan: HealPlan) -> Iterator[Any]:
    """The source itself, without gradients."""
    on_gpu = compute_device(plan.device).type == "cuda"
    with load(plan.teacher, plan.teacher.dtype if shards() and on_gpu else "auto", place(plan)) as model:
        yield pad_values(model.requires_grad_(False))


def trainer_of(
    plan: HealPlan, text: TrainingText, student: Any, teacher: Any, names: list[str], checkpoints: Path
) -> HealingTrainer:
    """The trainer of a student, whose parameters of these names train."""
    return HealingTrainer(plan, text, *distillation_of(plan, student, teacher, names), checkpoints)


def distillation_of(plan: HealPlan, student: Any, teacher: Any, names: list[str]) -> tuple[Distillation, Trainable]:
    """A student with its teacher and the loss, and what trains of it: the parameters of these names, or LoRA beside them."""
    rank = plan.options.lora_rank
    what = Trainable(student, names) if rank is None else Adapted(student, names, rank, plan.seed)
    if plan.options.checkpointing:
        compute_layers_again(student)
    cache = None if plan.rounding is None else partial(rounding_cache, plan.rounding, plan.spec)
    return Distillation(student, teacher, plan.options.ce, plan.converted.vocabulary, cache, computes_in(plan)), what
