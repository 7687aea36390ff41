"""The two models of a healing, and its training: the student, and the teacher as it runs or as a cache of it on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from attention.errors import Failure
from attention.padding import pad_values
from attention.rounded import rounding_cache
from convert.healing.batches import TrainingText
from convert.healing.cache import Kept, TeacherCache
from convert.healing.loop import Outcome, healed
from convert.healing.plan import HealPlan
from convert.healing.states import Progressed, States
from convert.healing.student import compute_layers_again, trained, without_dropout
from convert.healing.teacher import Running, Teacher
from convert.healing.team import Team
from convert.healing.trainable import Adapted, Trainable
from convert.healing.training import Distillation, Schedule, Trainer
from convert.healing.weights import held_parameters
from eval.inputs.loading import load
from eval.inputs.reader import Reader
from eval.terminal.progress import Progress, stage


def train(
    plan: HealPlan,
    text: TrainingText,
    reader: Reader,
    team: Team,
    states: Path,
    progress: Progress,
    kept: Callable[[Progressed], object] = lambda progressed: None,
) -> tuple[Outcome, dict[str, str]]:
    """Train the student, from its last state on. Every process calls this.

    Args:
        plan: The plan.
        text: The text to train on.
        reader: Reads the converted checkpoint.
        team: The processes that train.
        states: The directory of states.
        progress: Called with the tokens seen.
        kept: As of `healed`.

    Returns:
        The outcome, and the trained parameter that each tensor to write holds.
    """
    with teacher_of(plan, text, team, progress) as teacher, student_of(plan, team.device) as student:
        names = trained(student, plan.family, plan.spec.num_layers, plan.options.train)
        where = held_parameters(student, reader, names)  # before LoRA gives parameters other names
        stored = {parameter: reader.infos[name].dtype for name, parameter in where.items()}
        trainer = trainer_of(plan, text, student, teacher, names, team)
        outcome = healed(plan, trainer, States(states, trainer), stored, kept, progress)
        del trainer
        team.accelerator.free_memory()
    return outcome, where


@contextlib.contextmanager
def student_of(plan: HealPlan, device: str) -> Iterator[Any]:
    """The student in fp32, without gradients yet."""
    with load(plan.converted, "float32", device) as model:
        yield pad_values(without_dropout(model).requires_grad_(False))


@contextlib.contextmanager
def teacher_of(plan: HealPlan, text: TrainingText, team: Team, progress: Progress) -> Iterator[Teacher]:
    """The teacher. If the plan keeps what it says on disk, it is gone from memory already.

    Every process calls this.
    """
    if plan.options.teacher_cache is not None:
        yield Kept(_filled(plan, plan.options.teacher_cache, text, team, progress))
        return
    with running(plan, team.device, plan.teacher.dtype if team.shards and team.on_gpu else "auto") as teacher:
        yield teacher


@contextlib.contextmanager
def running(plan: HealPlan, device: str, dtype: str = "auto") -> Iterator[Running]:
    """The source itself; `dtype` as in `EvaluationSettings`."""
    with load(plan.teacher, dtype, device) as model:
        yield Running(pad_values(model.requires_grad_(False)), plan.options.top_k)


def _filled(plan: HealPlan, directory: Path, text: TrainingText, team: Team, progress: Progress) -> TeacherCache:
    """A cache with all blocks that the training sees. Every process adds its part of those that are not there."""
    cache, group = TeacherCache.of(plan, directory, text, team), team.accelerator
    seen = text.seen(max(plan.steps, plan.trial_steps), plan.batch, plan.seed).tolist()
    missing = cache.missing(seen[group.process_index :: group.num_processes])
    if missing:
        assert plan.options.top_k is not None
        cache.require_space(len(missing) * group.num_processes, plan.context, plan.options.top_k)
        device = str(group.device)
        asking = stage(progress, "ask the teacher", len(missing), "block")
        with running(plan, device) as teacher, asking as done, team.autocast():
            for start in range(0, len(missing), plan.micro_batch):
                indices = missing[start : start + plan.micro_batch]
                cache.add(teacher, text, indices, plan.teacher.vocabulary, device)
                done(len(indices))
    group.wait_for_everyone()
    if elsewhere := cache.missing(seen):
        raise Failure(
            f"{len(elsewhere)} blocks that other processes wrote are not in {directory} here",
            hint="--teacher-cache has to be a directory that all machines see",
        )
    return cache


def trainer_of(plan: HealPlan, text: TrainingText, student: Any, teacher: Teacher, names: list[str], team: Team) -> Trainer:
    """The trainer of a student, whose parameters of these names train."""
    module, what = distillation_of(plan, student, teacher, names)
    schedule = Schedule(plan.steps, plan.batch, plan.micro_batch, plan.options.lr or 0.0, plan.seed)
    return Trainer(team.accelerator, module, text, schedule, what, team.autocast)


def distillation_of(plan: HealPlan, student: Any, teacher: Teacher, names: list[str]) -> tuple[Distillation, Trainable]:
    """A student with its teacher and the loss, and what trains of it: the parameters of these names, or LoRA beside them."""
    rank = plan.options.lora_rank
    what = Trainable(student, names) if rank is None else Adapted(student, names, rank, plan.seed)
    if plan.options.checkpointing:
        compute_layers_again(student)
    cache = None if plan.rounding is None else partial(rounding_cache, plan.rounding, plan.spec)
    return Distillation(student, teacher, plan.options.ce, plan.converted.vocabulary, cache), what
