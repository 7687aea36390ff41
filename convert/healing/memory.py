"""How much memory and disk space a healing will take, from configs alone.

What autograd keeps of a forward pass is counted in one that computes nothing: torch's fake tensors have shapes and no values.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from attention.auto import from_config
from attention.padding import pad_values
from attention.spec import dtype_bytes
from attention.versions import keep_caps
from convert.checkpoint.loading import empty_model
from convert.healing.heads import hidden_states
from convert.healing.loss import VALUES_AT_ONCE
from convert.healing.student import compute_layers_again, of_part
from convert.healing.team import computes_in
from convert.healing.trainable import is_matrix
from eval.machine.capacity import count_parameters
from eval.machine.device import compute_device

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from convert.healing.plan import HealPlan

_FP32 = 4
_PER_WEIGHT = 5  # fp32 numbers for each that trains: its gradient, two moments of AdamW, and two copies while a step is taken
_KEPT = 9  # fp32 numbers on disk for each: it and its moments in the last checkpoint, in the best, and in the one being written
_OF_LOGITS = (
    9  # fp32 copies of the logits that exist at once, of both models and their gradients, and what malloc keeps of them
)
_OTHER = 80_000_000  # bytes on a CPU, as measured: tokenizers, text, and what malloc does not give back


def expected(plan: HealPlan, parts: int = 1) -> dict[str, int]:
    """Bytes of each part, at the time when most is held; on a GPU, of that GPU.

    Args:
        plan: The plan.
        parts: How many processes the weights are divided among.
    """
    model, names = _model(plan)
    kept = "float32" if compute_device(plan.device).type == "cpu" else plan.teacher.dtype
    return {
        "student": _FP32 * sum(parameter.numel() for parameter in model.parameters()) // parts,
        "teacher": dtype_bytes(kept) * count_parameters(plan.teacher.config) // parts,
        "training": _FP32 * _PER_WEIGHT * _trained(plan, model, names) // parts,
        "activations": _activations(plan, names),
        "logits": _FP32 * _OF_LOGITS * min(VALUES_AT_ONCE, plan.micro_batch * plan.context * plan.converted.vocabulary),
        "other": _OTHER if compute_device(plan.device).type == "cpu" else 0,
    }


def disk(plan: HealPlan) -> int:
    """Bytes on disk while it runs, besides the result."""
    return _FP32 * _KEPT * _trained(plan, *_model(plan))


def _model(plan: HealPlan) -> tuple[Any, set[str]]:
    """The student without values, and the names of what trains, with those few of which nothing may change."""
    model = empty_model(plan.converted.config)
    return model, set(of_part(model, plan.family, plan.spec.num_layers, plan.options.train))


def _trained(plan: HealPlan, model: Any, names: Collection[str]) -> int:
    """How many numbers train."""
    rank = plan.options.lora_rank
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name in names}
    return sum(
        shape.numel() if rank is None or not is_matrix(model, name) else rank * sum(shape) for name, shape in shapes.items()
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


def _activations(plan: HealPlan, names: Collection[str]) -> int:
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
            parameter.requires_grad_(name in names)
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
