"""What a healing takes: memory and disk space, from configs alone, and time, by a few of its steps.

What autograd keeps of a forward pass is counted in one that computes nothing: torch's fake tensors have shapes and no values.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from attention.auto import from_config
from attention.errors import Refusal
from attention.kv_bytes import dtype_bytes
from attention.padding import pad_values
from attention.versions import keep_caps
from convert.healing.loss import VALUES_AT_ONCE, Distillation, hidden_states
from convert.healing.models import distillation_of
from convert.healing.plan import HealPlan
from convert.healing.team import computes_in, shards
from convert.healing.texts import TrainingTexts
from convert.healing.trainable import compute_layers_again, is_matrix
from convert.launch import launched_count
from convert.output.destination import Output, begun, read_provenance
from eval.machine.capacity import count_parameters
from eval.machine.clock import timed
from eval.machine.device import compute_device, free_memory, memory_for
from eval.terminal.progress import Progress, stage

_log = logging.getLogger("kvfold")
_FP32 = 4
_PER_WEIGHT = 5  # fp32 numbers for each that trains: its gradient, two moments of AdamW, and two copies while a step is taken
_KEPT = 9  # fp32 numbers on disk for each: it and its moments in the last checkpoint, in the best, and in the one being written
_OF_LOGITS = 9  # fp32 copies of the logits at once, of both models and their gradients, and what malloc keeps of them
_OTHER = 80_000_000  # bytes on a CPU, as measured: tokenizers, text, and what malloc does not give back
_ROUNDS, _STEPS = 3, 3  # each round times steps of the size that follows from the round before
_RATES = 3  # that are tried at least, where any are
_DIGITS = 3  # of the number of tokens


def expected(plan: HealPlan, parts: int = 1) -> dict[str, int]:
    """Bytes of each part, at the time when most is held; on a GPU, of that GPU.

    Args:
        plan: The plan.
        parts: How many processes the weights are divided among.
    """
    on_cpu = compute_device(plan.device).type == "cpu"
    of_teacher = dtype_bytes("float32" if on_cpu else plan.teacher.dtype) * count_parameters(plan.teacher.config)
    return {
        "student": _FP32 * sum(parameter.numel() for parameter in plan.model.parameters()) // parts,
        "teacher": of_teacher // parts,
        "training": _FP32 * _PER_WEIGHT * _trained(plan) // parts,
        "activations": _activations(plan),
        "logits": _FP32 * _OF_LOGITS * min(VALUES_AT_ONCE, plan.micro_batch * plan.context * plan.converted.vocabulary),
        "other": _OTHER if on_cpu else 0,
    }


def say_memory(plan: HealPlan) -> None:
    """Log how much memory a healing takes, and warn if there is less."""
    device = compute_device(plan.device)
    needed, free = sum(expected(plan, launched_count() if shards() else 1).values()), free_memory(device)
    _log.info("takes about %.1f GB of memory on %s", needed / 1e9, device)
    if needed > free:
        _log.warning(
            "%s has %.1f GB free, and healing takes about %.1f GB; less with --checkpointing or --micro-batch-tokens",
            device, free / 1e9, needed / 1e9,
        )  # fmt: skip


def disk(plan: HealPlan) -> int:
    """Bytes on disk while it runs, besides the result."""
    return _FP32 * _KEPT * _trained(plan)


def _trained(plan: HealPlan) -> int:
    """How many numbers train."""
    rank, shapes = plan.lora_rank, {name: plan.model.get_parameter(name).shape for name in plan.names}
    return sum(
        rank * sum(shape) if rank is not None and is_matrix(plan.model, name) else shape.numel()
        for name, shape in shapes.items()
    )


@contextlib.contextmanager
def _without_grouped_products() -> Iterator[None]:
    """Experts by transformers' own operation: torch's grouped products take tensors without numbers in bfloat16 alone."""
    from transformers.integrations import moe

    asked = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *args, **kwargs: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = asked


def _activations(plan: HealPlan) -> int:
    """Bytes that autograd keeps of one forward pass."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.initialization import no_init_weights

    seen: dict[int, Any] = {}  # storages, which are kept so that no other one takes an address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(storage._cdata, storage)
        return tensor

    with FakeTensorMode(), no_init_weights(), _without_grouped_products():
        student = from_config(plan.converted.config, dtype=torch.float32)
        pad_values(keep_caps(student).eval())
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in plan.names)
        if plan.options.checkpointing:
            compute_layers_again(student)
        for module in student.modules():
            if isinstance(getattr(module, "rope_type", None), str):
                module.rope_type = "default"  # others look at the values of positions, which are not there
        own = {tensor.untyped_storage()._cdata for tensor in (*student.parameters(), *student.buffers())}
        ids = torch.zeros(plan.micro_batch, plan.context, dtype=torch.long)
        rounded = torch.autocast("cpu", torch.bfloat16, enabled=computes_in(plan) is torch.bfloat16)
        with rounded, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden_states(student, ids)
    return sum(storage.nbytes() for address, storage in seen.items() if address not in own)


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
    with room, distillation_of(plan) as (module, *_), stage(progress, "time steps", _ROUNDS * _STEPS, "step") as done:
        for _ in range(_ROUNDS):
            training, measuring = _paces(plan, module)
            taken = _seconds(plan, texts, training, measuring)
            if plan is shortest and taken > seconds:
                raise Refusal(
                    f"a healing of {plan.tokens} tokens takes {taken:.2g} seconds here, longer than --time allows",
                    hint="give more time, or another --device",
                )
            plan = replace(plan, asked=max(shortest.tokens, _rounded(plan.tokens + (seconds - taken) / training)))
            done(_STEPS)
    return plan


def _paces(plan: HealPlan, module: Distillation) -> tuple[float, float]:
    """The seconds of a token in a step, but for the optimiser's part, and in a measurement."""
    device = compute_device(plan.device)
    ids = torch.zeros(plan.micro_batch, plan.context, dtype=torch.int64, device=device)

    def step() -> None:
        module(ids).backward()

    def measure() -> None:
        with torch.no_grad():
            module(ids, measures=True)

    runs = (timed(device, work, module.zero_grad, 1 + _STEPS) for work in (step, measure))
    training, measuring = (statistics.median(seconds[1:]) / ids.numel() for seconds in runs)  # the first one is slower
    return training, measuring


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


def _begun(output: Output) -> tuple[int, int] | None:
    """All tokens, and those of a step, of the healing that `--resume` goes on with; None if there is none."""
    recipe = {} if output.overwrite else read_provenance(output.path).get("recipe")
    options = begun(output.path) or (recipe.get("heal") if isinstance(recipe, dict) else None)
    sizes = [options.get(name) for name in ("tokens", "batch_tokens")] if isinstance(options, dict) else []
    tokens, batch_tokens = (size if isinstance(size, int) else None for size in sizes or (None, None))
    return None if tokens is None or batch_tokens is None else (tokens, batch_tokens)
