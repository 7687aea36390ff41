"""The two models of a healing, the student and its teacher, and its training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from attention.encoded_forward import rounding_cache
from attention.padding import pad_values
from convert.healing.loop import Outcome, healed
from convert.healing.loss import Distillation
from convert.healing.plan import HealPlan
from convert.healing.team import computes_in, place, shards
from convert.healing.texts import TrainingText
from convert.healing.trainable import Adapted, Trainable, compute_layers_again, trained
from convert.healing.trainer import HealingTrainer
from convert.healing.weights import held_parameters
from eval.inputs.loading import load
from eval.inputs.reader import Reader
from eval.machine.device import compute_device
from eval.quality.opened import Opening
from eval.terminal.progress import Progress


def train(
    plan: HealPlan, text: TrainingText, reader: Reader, checkpoints: Path, progress: Progress, opening: Opening = load
) -> tuple[Outcome, dict[str, str]]:
    """Train the student, from its last checkpoint on. Every process calls this.

    Args:
        plan: The plan.
        text: The text to train on.
        reader: Reads the converted checkpoint.
        checkpoints: The directory of the Trainer's checkpoints.
        progress: Called with the tokens seen.
        opening: Loads the models.

    Returns:
        The outcome, and the trained parameter that each tensor to write holds.
    """
    with distillation_of(plan, opening) as (module, what, names):
        where = held_parameters(plan.model, reader, names)
        stored = {parameter: reader.infos[name].dtype for name, parameter in where.items()}
        trainer = HealingTrainer(plan, text, module, what, checkpoints)
        outcome, accelerator = healed(plan, trainer, stored, progress), trainer.accelerator
        del trainer
        accelerator.free_memory()
    return outcome, where


@contextlib.contextmanager
def distillation_of(plan: HealPlan, opening: Opening = load) -> Iterator[tuple[Distillation, Trainable, list[str]]]:
    """Both models in memory with the loss, what trains of the student, and the class's names of that.

    The student is in fp32, and only what trains has gradients: these parameters, or LoRA beside them. The teacher is the source
    itself.
    """
    kept = plan.teacher.dtype if shards() and compute_device(plan.device).type == "cuda" else "auto"
    where = place(plan)
    with opening(plan.teacher, kept, where) as teacher, opening(plan.converted, "float32", where) as student:
        for model in (teacher, student):
            pad_values(model.requires_grad_(False))
        names, rank = trained(student, plan.names), plan.lora_rank
        what = Trainable(student, names) if rank is None else Adapted(student, names, rank, plan.seed)
        if plan.options.checkpointing:
            compute_layers_again(student)
        cache = None if plan.rounding is None else partial(rounding_cache, plan.rounding, plan.spec)
        yield Distillation(student, teacher, plan.converted.vocabulary, cache, computes_in(plan)), what, names
