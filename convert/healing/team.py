"""The processes of one healing: one, or those that `accelerate launch` or torchrun started.

Under FSDP 2, each holds a part of every tensor.
"""

import logging
import os
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch.distributed.tensor import DTensor, distribute_tensor

from attention.errors import Interrupted, Refusal
from convert.healing.plan import HealPlan
from convert.launch import is_first, launched_count
from eval.machine.device import compute_device, out_of_memory, rough

_PATIENCE = timedelta(days=1)  # others wait while the first process writes a text
_WIDE = 512  # on a CPU, casts of narrower models take longer than their products in bfloat16 save
_UNTRIED = {  # by the variable that asks for it: its name, and what to do instead
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed", "launch it with FSDP 2, which divides weights, too"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", "give --checkpointing to convert heal"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", "set it to false in accelerate's config"),
}


def computes_in(plan: HealPlan) -> torch.dtype:
    """The dtype of a healing's forward passes: bfloat16 where that is faster. Weights are fp32 all the same."""
    device = compute_device(plan.device)
    if device.type == "cpu" and plan.converted.decoder.hidden_size < _WIDE:
        return torch.float32
    return rough(device)


def join(plan: HealPlan) -> None:
    """Meet the other processes, if there are any. The first one warns and informs from here on.

    Raises:
        Refusal: They cannot share its steps, or were launched in a way that healing does not support.
    """
    for variable, (name, hint) in _UNTRIED.items():
        if parse_flag_from_env(variable):
            raise Refusal(f"healing does not support {name}", hint=hint)
    if shards():
        if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
            raise Refusal(f"healing does not support FSDP {version}", hint="set fsdp_version to 2 in accelerate's config")
        # Constants of latents are found in their values, so every process has to read the weights.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if (count := launched_count()) > 1:
        from accelerate import PartialState

        if plan.batch % count:
            raise Refusal(
                f"{count} processes cannot share steps of {plan.batch} blocks of {plan.context} tokens",
                hint=f"give --batch-tokens {count * plan.context} or a multiple of it",
            )
        if not is_first():
            logging.getLogger("kvfold").setLevel(logging.ERROR)
        PartialState(cpu=compute_device(plan.device).type == "cpu", timeout=_PATIENCE)


def shards() -> bool:
    """Whether each process holds a part of the weights only (FSDP)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"  # as accelerate reads it


def place(plan: HealPlan) -> str:
    """The device that models are loaded to; parts of them go to this process's own later."""
    device = compute_device(plan.device)
    if device.type == "cpu" or shards():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}" if launched_count() > 1 else str(device)


def agreed(mine: Any) -> Any:
    """The first process's argument. Every process calls this, and waits for it."""
    if launched_count() == 1:
        return mine
    from accelerate.utils import broadcast_object_list

    said = [mine]
    try:
        broadcast_object_list(said)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise Interrupted(
            f"another process has ended: {' '.join(str(error).split())[:120]}",
            hint="fix what that one says and rerun with --resume",
        ) from error
    return said[0]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Every process calls this, in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor, which shares its memory: torch 2.9 cannot fill a DTensor by a mask."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor that every process holds whole, in parts and on the device as `other` is."""
    if isinstance(tensor, DTensor):
        return tensor
    if not isinstance(other, DTensor):
        return tensor.to(other.device)
    # Without a source, no process sends anything: each takes its part of what it has.
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
