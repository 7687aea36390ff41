"""The weights of a student that train, parameters or thin matrices beside them (LoRA), and those that stay.

Constants that switch the norm of a latent off (`convert.families.latent`) are weights, too. They stay bit for bit, and so do
the zeros beside them: a latent behind a norm that is no longer neutral would be another class of model.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from convert.families.latent import constant_channels, is_query_latent
from convert.healing.plan import is_matrix
from convert.healing.team import whole

_ADAPTER = "default"  # peft's name
_ALPHA = 2  # times the rank: the factor of the product, as is common
_USUAL = 0.02  # the root mean square of matrices that learning rates are for, as transformers draws them


class Trainable:
    """What trains of a student: parameters; or LoRA by peft, of matrices (Hu et al. 2021, arXiv:2106.09685).

    With LoRA, a matrix W computes as W + 2 B A; A and B train, of a low rank. Norms and biases train as they are. A row of W
    that must stay has a row of zeros in B that stays.

    Args:
        student: On any device, with its weights; what trains requires gradients from here on. LoRA replaces linear modules.
        names: The names of the parameters. Those of which nothing may change do not train.
        rank: Of LoRA; None where matrices themselves train.
        seed: For A; B begins as zeros.

    Attributes:
        fixed: For what trains and has values that must stay: true where they must.
        scales: For what trains: its root mean square, or for B that of W, as a multiple of `_USUAL`; at least 1.
    """

    def __init__(self, student: Any, names: Iterable[str], rank: int | None = None, seed: int = 0) -> None:
        self._student, stay = student, fixed(student)
        names = [name for name in names if name not in stay or not bool(stay[name].all())]
        matrices = [] if rank is None else [name for name in names if is_matrix(student, name)]
        self._modules = [name.removesuffix(".weight") for name in matrices]
        self._outside = {self._inside(name): name for name in names if name not in matrices}
        self.fixed = {inside: stay[name] for inside, name in self._outside.items() if name in stay}
        if rank is not None:
            self._adapt(rank, seed)
            of_b = ((self._thin(module)[1], stay.get(name)) for module, name in zip(self._modules, matrices, strict=True))
            self.fixed |= {b: rows.all(-1, keepdim=True).expand(-1, rank) for b, rows in of_b if rows is not None}
        trains = {*self._outside, *(name for module in self._modules for name in self._thin(module))}
        larger = {self._thin(module)[1]: self._inside(f"{module}.weight") for module in self._modules}
        sizes = {name: student.get_parameter(larger.get(name, name)).detach().square().mean().sqrt() for name in trains}
        self.scales = {name: max(1.0, float(size) / _USUAL) for name, size in sizes.items()}
        for name, parameter in student.named_parameters():
            parameter.requires_grad_(name in trains)

    def _adapt(self, rank: int, seed: int) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=_ALPHA * rank, target_modules=self._modules), self._student)
        generator = torch.Generator().manual_seed(seed)
        for name in self._modules:
            first = self._student.get_parameter(self._thin(name)[0])
            drawn = nn.init.kaiming_uniform_(torch.empty(first.shape), a=math.sqrt(5), generator=generator)
            base = self._student.get_submodule(name)
            unread = ~(base.weight.mT if base.fan_in_fan_out else base.weight).any(0)  # channels of zeros stay so
            with torch.no_grad():  # peft's distribution, the same in all processes and runs
                first.copy_(drawn.to(first.device).masked_fill(unread, 0))

    def written(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of the checkpoint, by its class's names, for whole values of what trains. Every process calls this."""
        found = {self._outside[name]: weight for name, weight in weights.items() if name in self._outside}
        for name in self._modules:
            module = self._student.get_submodule(name)
            first, second = (weights[part] for part in self._thin(name))
            product = module.scaling[_ADAPTER] * (second @ first)
            base = whole(module.base_layer.weight).cpu()
            found[f"{name}.weight"] = base + (product.mT if module.fan_in_fan_out else product)
        return found

    def as_parameters(self, written: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inverse of `written`: parameters of the student by name, such that it computes with these weights."""
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


def fixed(model: Any) -> dict[str, torch.Tensor]:
    """For each parameter with values that must stay: true where they must, a bool tensor of its shape."""
    parameters, masks = {name: p.detach() for name, p in model.named_parameters()}, dict[str, torch.Tensor]()
    for part, norm, mask in (("kv_a_proj_with_mqa", "kv_a_layernorm", _of_keys), ("q_a_proj", "q_a_layernorm", _of_queries)):
        for bias in (name for name in parameters if name.endswith(f"{part}.bias")):
            path = bias.removesuffix(f"{part}.bias")
            names = f"{path}{part}.weight", bias, f"{path}{norm}.weight"
            if names[2] in parameters:
                masks |= zip(names, mask(*(parameters[name] for name in names)), strict=False)
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
