"""The processes of one healing: one, or those that `accelerate launch` started."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention.errors import Refusal
from convert.healing.plan import HealPlan
from convert.healing.training import Trainer
from convert.healing.zero import ZeroTrainer, zero_plugin
from convert.processes import PATIENCE, Processes
from eval.device import compute_device

_ZERO = "DEEPSPEED"
_TRIED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", _ZERO)  # accelerate's kinds of launches: one process, DDP, FSDP, ZeRO
_UNTRIED = {
    "fsdp_activation_checkpointing": "give --checkpointing to convert heal",
    "fsdp_offload_params": "set it to false",
}


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

        device = compute_device(plan.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # accelerate takes the current one
        bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        plugin, zero = fsdp_plugin(), zero_plugin(bfloat16)
        mixed = "bf16" if bfloat16 and zero is None else "no"  # DeepSpeed has an autocast of its own
        on_cpu = device.type == "cpu"
        try:
            accelerator = Accelerator(
                # Told to take CPUs, accelerate ignores DeepSpeed. It takes them where there is nothing else.
                cpu=on_cpu and zero is None,
                kwargs_handlers=[
                    InitProcessGroupKwargs(**({"backend": "gloo"} if on_cpu and zero is not None else {}), timeout=PATIENCE)
                ],
                mixed_precision=mixed,
                fsdp_plugin=plugin,
                deepspeed_plugin=zero,
                log_with=plan.options.track,
                project_dir=plan.logs,
            )
        except (ValueError, NotImplementedError) as error:  # accelerate keeps one state for a process
            raise Refusal(
                f"accelerate does not take {device} with mixed precision {mixed!r}: {' '.join(str(error).split())[:160]}",
                hint="this process has used accelerate in another way already; heal in a process of its own",
            ) from error
        kind = accelerator.distributed_type.value
        if zero is not None and kind != _ZERO:
            raise Refusal(
                f"ACCELERATE_USE_DEEPSPEED is set, but accelerate takes {kind}",
                hint="unset ACCELERATE_USE_CPU, or, if this process has used accelerate already, heal in a process of its own",
            )
        if kind not in _TRIED:
            raise Refusal(
                f"healing under {kind} was not tried, and could change constants of latents without an error",
                hint="launch it with one process, with several that hold a whole model each (DDP, ZeRO 1 or 2), or with FSDP 2",
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

    @property
    def trainer(self) -> type[Trainer]:
        """What trains under such a launch."""
        return ZeroTrainer if self.accelerator.distributed_type.value == _ZERO else Trainer

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

    def tell(self, states: Path | None) -> None:
        """Tell the others where states are, and so to train; or None, that there is nothing to do."""
        self._processes.first(lambda: states)

    def told(self) -> Path | None:
        """What the first process tells."""
        return self._processes.first(lambda: None)

    @property
    def _processes(self) -> Processes:
        return Processes(self.accelerator.process_index, self.accelerator.num_processes, str(self.accelerator.device))
