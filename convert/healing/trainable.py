"""The weights of a student that train: parameters as they are, or thin matrices beside them (LoRA)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from attention.errors import Refusal
from convert.healing.sharded import whole
from convert.healing.student import fixed

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
        parameters = dict(student.named_parameters())
        for name in names:
            parameters[name].requires_grad_(True)

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
        config = LoraConfig(r=rank, lora_alpha=_ALPHA * rank, lora_dropout=0.0, target_modules=self._modules)
        inject_adapter_in_model(config, student)
        generator = torch.Generator().manual_seed(seed)
        for name in self._modules:
            first = student.get_parameter(self._thin(name)[0])
            drawn = nn.init.kaiming_uniform_(torch.empty(first.shape), a=math.sqrt(5), generator=generator)
            base = student.get_submodule(name)
            unread = ~(base.weight.mT if base.fan_in_fan_out else base.weight).any(0)  # channels of zeros stay so
            with torch.no_grad():  # peft's distribution, the same in all processes and runs
                first.copy_(drawn.to(first.device).masked_fill(unread, 0))
        inside = {name: self._inside(name) for name in names if name not in matrices}
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in inside.values() or "lora_" in name)
        self._outside = {new: name for name, new in inside.items()}
        rows = {
            self._thin(name.removesuffix(".weight"))[1]: stay[name].all(-1, keepdim=True) for name in matrices if name in stay
        }
        self.fixed = {new: stay[name] for name, new in inside.items() if name in stay} | {
            name: mask.expand(-1, rank) for name, mask in rows.items()
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
        parameters = dict(self._student.named_parameters())
        off = {self._thin(name)[1]: torch.zeros(parameters[self._thin(name)[1]].shape) for name in self._modules}
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


def require_peft() -> None:
    """Raise `Refusal` where peft is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise Refusal("--train lora needs peft, which is not installed", hint="pip install 'kvfold[lora]'") from None
