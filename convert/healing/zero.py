"""DeepSpeed's ZeRO 1 and 2, which divide AdamW's moments among processes; ZeRO 2 divides gradients, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from typing import Any

import torch

from attention.errors import Refusal
from convert.healing.training import CLIP, NotFinite, State, Trainer

_MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
_PREFIX = "ACCELERATE_DEEPSPEED_"
_SET_HERE: dict[str, Any] = {"gradient_clipping": CLIP, "gradient_accumulation_steps": 1}
_BUCKET = 50_000_000  # numbers that travel at once


def zero_plugin(bfloat16: bool) -> Any:
    """The plugin for DeepSpeed, if that was asked for.

    Args:
        bfloat16: Whether autocast computes in it.

    Raises:
        Refusal: It is not installed, was asked for with settings that were not tried, or without a launcher.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    asked = {name.removeprefix(_PREFIX).lower(): value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    if "config_file" in asked:
        raise Refusal("healing makes DeepSpeed's config itself", hint="give accelerate zero_stage, not deepspeed_config_file")
    if (stage := asked.get("zero_stage", "2")) not in ("1", "2"):
        raise Refusal(f"healing does not support ZeRO {stage} of DeepSpeed", hint="set zero_stage to 1 or 2, or take FSDP 2")
    for what in ("offload_optimizer_device", "offload_param_device"):
        if (device := asked.get(what, "none")) != "none":
            raise Refusal(f"healing does not support {what} {device} of DeepSpeed", hint="set it to none")
    for what, value in _SET_HERE.items():
        if (given := os.environ.get(f"ACCELERATE_{what.upper()}", "auto")) not in ("auto", "none") and float(given) != value:
            raise Refusal(f"healing does not support {what} {given}", hint=f"set it to {value:g}, or leave it out")
    if find_spec("deepspeed") is None:
        raise Refusal("DeepSpeed is not installed", hint="pip install 'kvfold[deepspeed]', or launch with FSDP 2")
    if "LOCAL_RANK" not in os.environ:
        raise Refusal(
            "ACCELERATE_USE_DEEPSPEED is set, but no launcher started this process",
            hint="launch it with accelerate launch, or unset that",
        )
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=int(stage), **_SET_HERE)
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": 1,  # unused: steps are cut into parts here
        # Gradients travel in fp32, as they do without DeepSpeed.
        "torch_autocast": {"enabled": bfloat16, "dtype": "bfloat16", "lower_precision_safe_modules": []},
    }
    plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = _BUCKET
    return plugin


class ZeroTrainer(Trainer):
    """A trainer under DeepSpeed, which steps at the end of the last backward pass; its states are those of `Trainer`."""

    def __init__(self, accelerator: Any, *arguments: Any) -> None:
        super().__init__(accelerator, *arguments)
        for name, mask in self._masks.items():  # DeepSpeed takes gradients before anyone else sees them
            self._weights[name].register_hook(partial(_masked, mask))
        self._zero = self.optimiser.optimizer  # DeepSpeed's, around AdamW
        weights = self._weights.values()
        self._groups = [p for p in weights if p.ndim > 1], [p for p in weights if p.ndim < 2]  # in the order of `Trainer`

    def restore(self, weights: Mapping[str, torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        super().restore(weights)
        for name, p in self._weights.items():
            safe_set_full_fp32_param(p, weights[name].to(p.device))

    def state(self) -> State:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        adam, places = self._zero.optimizer, list(chain(*self._groups))
        steps, found = next(iter(adam.state.values()))["step"].cpu(), {}
        for place, p in enumerate(places):
            moments = {name: safe_get_full_optimizer_state(p, name) for name in _MOMENTS}
            if self.leads:
                found[place] = {"step": steps.clone()} | {name: tensor.cpu() for name, tensor in moments.items()}
        numbers = iter(range(len(places)))
        of_groups = zip(adam.state_dict()["param_groups"], filter(None, self._groups), strict=True)
        groups = [described | {"params": list(islice(numbers, len(group)))} for described, group in of_groups]
        return State(self._kept(self._weights), {"state": found, "param_groups": groups})

    def load(self, state: State) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        self.restore(state.weights)
        known, inner = state.optimiser["state"], self._zero.optimizer.state
        for _, part in self._parts():
            inner[part] = {"step": known[0]["step"].clone()} | {name: torch.zeros_like(part) for name in _MOMENTS}
        self._link()
        for place, p in enumerate(chain(*self._groups)):
            for name in _MOMENTS:
                safe_set_full_optimizer_state(p, known[place][name].to(p.device), name)

    def _parts(self) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """The weights of each group, and what AdamW trains in this process: its part of them, flat."""
        return zip(self._zero.bit16_groups, self._zero.single_partition_of_fp32_groups, strict=True)

    def _link(self) -> None:
        """Let each weight know its moments. DeepSpeed does so at the first step of the first group: too soon for the others."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        for weights, part in self._parts():
            lazy_init_hp_params_optimizer_state(weights, part, self._zero.optimizer.state)

    def _apart(self) -> Any:
        return contextlib.nullcontext()  # `_backward` says where a step ends

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        self.accelerator.deepspeed_engine_wrapped.backward(loss, sync_gradients=last)

    def _update(self, step: int) -> None:
        if self._zero.overflow:  # it has left this step out
            raise NotFinite(
                f"gradients are not finite at step {step + 1}", hint="begin again with a smaller --lr and --overwrite"
            )

    def _forget(self) -> None:
        for state in self._zero.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()  # other tensors are views of these


def _masked(mask: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.masked_fill(mask, 0)
