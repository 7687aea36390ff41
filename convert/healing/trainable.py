"""The weights of a student that train, parameters or thin matrices beside them (LoRA), and those that stay.

Constants that switch the norm of a latent off (`convert.families.latent`) are weights, too. They stay bit for bit, and so do
the zeros beside them: a latent behind a norm that is no longer neutral would be another class of model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from convert.families.latent import constant_channels, is_query_latent
from convert.healing.team import whole

_ADAPTER = "default"  # peft's name
_ALPHA = 2  # times the rank: the factor of the product, as is common


class Trainable:
    """Parameters of a student.

    Args:
        student: On any device; these of its parameters require gradients from here on.
        names: Their names.

    Attributes:
        fixed: For those with values that must stay: true where they must.
    """

    def __init__(self, student: Any, names: Collection[str]) -> None:
        self._student, self.fixed = student, fixed(student)
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in names)

    def written(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of the checkpoint, by its class's names, for whole values of what trains. Every process calls this."""
        return dict(weights)

    def as_parameters(self, written: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inverse of `written`: parameters of the student by name, such that it computes with these weights."""
        return dict(written)


class Adapted(Trainable):
    """LoRA by peft: a matrix W computes as W + 2 B A; A and B train, of a low rank (Hu et al. 2021, arXiv:2106.09685).

    Norms and biases train as they are. A row of W that must stay has a row of zeros in B that stays.

    Args:
        student: As of `Trainable`; its linear modules are replaced.
        names: The names of the parameters that would train.
        rank: Of the products.
        seed: For A; B begins as zeros.
    """

    def __init__(self, student: Any, names: Collection[str], rank: int, seed: int) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        self._student, stay = student, fixed(student)
        matrices = [name for name in names if is_matrix(student, name)]
        self._modules = [name.removesuffix(".weight") for name in matrices]
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=_ALPHA * rank, target_modules=self._modules), student)
        generator = torch.Generator().manual_seed(seed)
        for name in self._modules:
            first = student.get_parameter(self._thin(name)[0])
            drawn = nn.init.kaiming_uniform_(torch.empty(first.shape), a=math.sqrt(5), generator=generator)
            base = student.get_submodule(name)
            unread = ~(base.weight.mT if base.fan_in_fan_out else base.weight).any(0)  # channels of zeros stay so
            with torch.no_grad():  # peft's distribution, the same in all processes and runs
                first.copy_(drawn.to(first.device).masked_fill(unread, 0))
        self._outside = {self._inside(name): name for name in names if name not in matrices}
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in self._outside or "lora_" in name)
        self.fixed = {inside: stay[name] for inside, name in self._outside.items() if name in stay} | {
            self._thin(module)[1]: stay[name].all(-1, keepdim=True).expand(-1, rank)
            for module, name in zip(self._modules, matrices, strict=True)
            if name in stay
        }

    def written(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {self._outside[name]: weight for name, weight in weights.items() if name in self._outside}
        for name in self._modules:
            module = self._student.get_submodule(name)
            first, second = (weights[part] for part in self._thin(name))
            product = module.scaling[_ADAPTER] * (second @ first)
            base = whole(module.base_layer.weight).cpu()
            found[f"{name}.weight"] = base + (product.mT if module.fan_in_fan_out else product)
        return found

    def as_parameters(self, written: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        thin = [self._thin(name)[1] for name in self._modules]
        off = {name: torch.zeros(self._student.get_parameter(name).shape) for name in thin}
        return {self._inside(name): weight for name, weight in written.items()} | off

    def _inside(self, name: str) -> str:
        """Where a parameter of the class is in the student."""
        module, _, part = name.rpartition(".")
        return f"{module}.base_layer.{part}" if module in self._modules else name

    @staticmethod
    def _thin(module: str) -> tuple[str, str]:
        """The names of A `[rank, in]` and B `[out, rank]`."""
        return f"{module}.lora_A.{_ADAPTER}.weight", f"{module}.lora_B.{_ADAPTER}.weight"


def is_matrix(model: Any, name: str) -> bool:
    """Whether a parameter is the matrix of a linear module."""
    module, _, part = name.rpartition(".")
    return part == "weight" and isinstance(model.get_submodule(module), nn.Linear | Conv1D)


def trained(model: Any, names: Iterable[str]) -> list[str]:
    """Of these names, the parameters to train: not those of which nothing may change. The model has its weights."""
    still = fixed(model)
    return [name for name in names if name not in still or not bool(still[name].all())]


def fixed(model: Any) -> dict[str, torch.Tensor]:
    """For each parameter with values that must stay: true where they must, a bool tensor of its shape."""
    masks: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for part, norm_part, mask in (
            ("kv_a_proj_with_mqa", "kv_a_layernorm", _of_keys),
            ("q_a_proj", "q_a_layernorm", _of_queries),
        ):
            modules: tuple[Any, Any] = getattr(module, part, None), getattr(module, norm_part, None)
            down, norm = modules
            if getattr(norm, "weight", None) is not None and getattr(down, "bias", None) is not None:
                found = mask(down.weight.detach(), down.bias.detach(), norm.weight.detach())
                names = f"{part}.weight", f"{part}.bias", f"{norm_part}.weight"
                masks |= {f"{path}.{name}".removeprefix("."): one for name, one in zip(names, found, strict=False)}
    return masks


def _of_keys(weight: torch.Tensor, bias: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Constants of a neutral latent of keys and values, whose rows the RoPE key follows; masks of weight, bias and gain.

    Biases of true channels that are zero stay, too: kvfold reads no others.
    """
    rank = len(gain)
    constant = constant_channels(gain, weight[:rank], bias[:rank])
    if constant is None:
        return ()
    rows = nn.functional.pad(constant, (0, len(weight) - rank))
    biases = nn.functional.pad(constant | (bias[:rank] == 0), (0, len(bias) - rank))
    return rows[:, None].expand_as(weight), biases, torch.ones_like(gain, dtype=torch.bool)


def _of_queries(weight: torch.Tensor, bias: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Fixed weights of a neutral latent of queries, which is the input itself: everything."""
    if not is_query_latent({"q_a_proj.weight": weight, "q_a_proj.bias": bias, "q_a_layernorm.weight": gain}):
        return ()
    return tuple(torch.ones_like(one, dtype=torch.bool) for one in (weight, bias, gain))


def compute_layers_again(student: Any) -> None:
    """Gradient checkpointing, which transformers does in training mode only; in that, nothing else may change."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Newer versions of transformers have another name for it, and warn of this one.
    enable = getattr(student, "activation_checkpointing_enable", None) or student.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in student.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # of this module alone: those in it stay as they are
            for rates in (module, getattr(module, "config", module)):
                for name, value in list(vars(rates).items()):
                    if isinstance(value, float) and "drop" in name:
                        setattr(rates, name, 0.0)
