"""What a healing takes of memory and disk space, from configs alone."""

from __future__ import annotations

import logging

from attention.spec import dtype_bytes
from convert.healing.plan import HealPlan
from convert.healing.team import shards
from convert.healing.trainable import is_matrix
from convert.launch import launched_count
from eval.machine.capacity import count_parameters
from eval.machine.device import compute_device, free_memory

_log = logging.getLogger("kvfold")
_FP32 = 4
_PER_WEIGHT = 5  # fp32 numbers for each that trains: its gradient, two moments of AdamW, and two copies while a step is taken
_KEPT = 9  # fp32 numbers on disk for each: it and its moments in the last checkpoint, in the best, and in the one being written


def held(plan: HealPlan, parts: int = 1) -> dict[str, int]:
    """Bytes of what is held all the time; what autograd keeps of a forward pass comes on top.

    Args:
        plan: The plan.
        parts: How many processes the weights are divided among.
    """
    kept = "float32" if compute_device(plan.device).type == "cpu" else plan.teacher.dtype
    return {
        "student": _FP32 * sum(parameter.numel() for parameter in plan.model.parameters()) // parts,
        "teacher": dtype_bytes(kept) * count_parameters(plan.teacher.config) // parts,
        "training": _FP32 * _PER_WEIGHT * _trained(plan) // parts,
    }


def say_memory(plan: HealPlan) -> None:
    """Log how much memory a healing takes, and warn if there is less."""
    device = compute_device(plan.device)
    needed, free = sum(held(plan, launched_count() if shards() else 1).values()), free_memory(device)
    _log.info("takes %.1f GB of memory on %s, and activations", needed / 1e9, device)
    if needed > free:
        _log.warning(
            "%s has %.1f GB free, and healing takes %.1f GB without activations; less with --train lora",
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
