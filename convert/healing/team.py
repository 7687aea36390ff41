"""The processes of one healing: one, or those that `accelerate launch` started."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from attention.errors import Interrupted, Refusal
from convert.healing.plan import HealPlan
from eval.machine.device import compute_device, out_of_memory, rough

_PATIENCE = timedelta(days=1)  # others wait while the first process writes a text
_TRIED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # accelerate's kinds of launches: one process, DDP, FSDP
_WIDE = 512  # on a CPU, casts of narrower models take longer than their products in bfloat16 save
_UNTRIED = {
    "fsdp_activation_checkpointing": "give --checkpointing to convert heal",
    "fsdp_offload_params": "set it to false",
}


def computes_in(plan: HealPlan) -> torch.dtype:
    """The dtype of a healing's forward passes: bfloat16 where that is faster. Weights are fp32 all the same."""
    device = compute_device(plan.device)
    if device.type == "cpu" and plan.converted.decoder.hidden_size < _WIDE:
        return torch.float32
    found: torch.dtype = rough(device)
    return found


def fsdp_plugin() -> Any:
    """The plugin for FSDP, if it was asked for: sharded layer by layer, with the numbers of one process.

    Raises:
        Refusal: It was asked for in its first version, or with settings that were not tried.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise Refusal(f"healing does not support FSDP {version}", hint="set fsdp_version to 2 in accelerate's config")
    for setting, hint in _UNTRIED.items():
        if os.environ.get(setting.upper(), "false").lower() == "true":
            raise Refusal(f"healing does not support {setting} of accelerate's config", hint=hint)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        # Constants of latents are found in their values, so every process has to read the weights.
        cpu_ram_efficient_loading=False,
        # Autocast decides, as it does with one process; weights and gradients stay fp32 on their way.
        mixed_precision_policy=MixedPrecisionPolicy(),
    )
    plugin.transformer_cls_names_to_wrap = None  # the two models say themselves what their layers are
    return plugin


@dataclass(frozen=True)
class Team:
    """These processes, as one of them sees them.

    Attributes:
        accelerator: Of accelerate.
        bfloat16: Whether autocast computes in it.
    """

    accelerator: Any
    bfloat16: bool

    @classmethod
    def of(cls, plan: HealPlan) -> Team:
        """The processes that carry out a plan.

        Raises:
            Refusal: They cannot share its steps, or were launched in a way that healing does not support.
        """
        from accelerate import Accelerator, InitProcessGroupKwargs

        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            raise Refusal("healing does not support DeepSpeed", hint="launch it with FSDP 2, which divides weights, too")
        device = compute_device(plan.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # accelerate takes the current one
        bfloat16 = computes_in(plan) is torch.bfloat16
        plugin, on_cpu = fsdp_plugin(), device.type == "cpu"
        # On CPUs `autocast` is all: accelerate keeps one setting for a process, which may heal a wide model after a narrow one.
        mixed = "bf16" if bfloat16 and not on_cpu else "no"
        try:
            accelerator = Accelerator(
                cpu=on_cpu,
                kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)],
                mixed_precision=mixed,
                fsdp_plugin=plugin,
                log_with=plan.options.track,
                project_dir=plan.logs,
            )
        except (ValueError, NotImplementedError) as error:  # accelerate keeps one state for a process
            raise Refusal(
                f"accelerate does not take {device} with mixed precision {mixed!r}: {' '.join(str(error).split())[:160]}",
                hint="this process has used accelerate in another way already; heal in a process of its own",
            ) from error
        kind = accelerator.distributed_type.value
        if kind not in _TRIED:
            raise Refusal(
                f"healing under {kind} was not tried, and could change constants of latents without an error",
                hint="launch it with one process, with several that hold a whole model each (DDP), or with FSDP 2",
            )
        if accelerator.device.type != device.type:
            raise Refusal(
                f"accelerate computes on {accelerator.device}, not on {device}",
                hint=f"give --device {accelerator.device.type}"
                + (", or set CUDA_VISIBLE_DEVICES to nothing" if on_cpu else ", or unset ACCELERATE_USE_CPU"),
            )
        if plan.batch % accelerator.num_processes:
            raise Refusal(
                f"{accelerator.num_processes} processes cannot share steps of {plan.batch} blocks of {plan.context} tokens",
                hint=f"give --batch-tokens {accelerator.num_processes * plan.context} or a multiple of it",
            )
        return cls(accelerator, bfloat16)

    @property
    def leads(self) -> bool:
        """Whether this process is the one that reads options, writes files and shows progress."""
        return bool(self.accelerator.is_main_process)

    @property
    def shards(self) -> bool:
        """Whether each process holds a part of the weights only (FSDP)."""
        return bool(self.accelerator.is_fsdp2)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which models compute as they do while they train."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.bfloat16)

    @property
    def on_gpu(self) -> bool:
        """Whether it trains on one."""
        return bool(self.accelerator.device.type != "cpu")

    @property
    def device(self) -> str:
        """The device that models are loaded to; parts of them go to this process's own later."""
        device = torch.device("cpu") if self.shards else self.accelerator.device
        return "cpu" if device.type == "cpu" else f"cuda:{torch.cuda.current_device()}"

    def agreed(self, mine: Any) -> Any:
        """The first process's argument. Every process calls this, and waits for it."""
        if self.accelerator.num_processes == 1:
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
