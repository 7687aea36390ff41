"""Weights of a converted model that healing trains, and those that stay.

Constants that switch the norm of a latent off (`convert.families.neutral`) are weights, too. They stay bit for bit, and so do
the zeros beside them: a latent behind a norm that is no longer neutral would be another class of model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from attention.neutral import constant_channels
from convert.families import Family
from convert.families.neutral import is_query_latent


def trained(model: Any, family: Family, layers: int, part: str) -> list[str]:
    """The names of the parameters to train: those of a part, without those of which nothing may change.

    Args:
        model: The student, on any device but meta.
        family: The family that reads it.
        layers: How many it has.
        part: "attention", with the norms before it; "lora", of the same; or "all".
    """
    still = fixed(model)
    return [name for name in of_part(model, family, layers, part) if name not in still or not bool(still[name].all())]


def of_part(model: Any, family: Family, layers: int, part: str) -> list[str]:
    """The names of all parameters of a part. Arguments as of `trained`; the model may be on the meta device."""
    inside = tuple(f"{module}." for layer in range(layers) for module in _modules(family, layer))
    return [name for name, _ in model.named_parameters() if part == "all" or name.startswith(inside)]


def _modules(family: Family, layer: int) -> Iterator[str]:
    yield family.module(layer)
    if (norm := family.input_norm(layer)) is not None:
        yield norm.name


def fixed(model: Any) -> dict[str, torch.Tensor]:
    """For each parameter with values that must stay: true where they must, a bool tensor of its shape."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for part in ("kv_a_proj_with_mqa", "q_a_proj"):
            norm = getattr(module, "kv_a_layernorm" if part.startswith("kv") else "q_a_layernorm", None)
            down = getattr(module, part, None)
            if getattr(norm, "weight", None) is not None and getattr(down, "bias", None) is not None:
                kept = _of_keys(down, norm) if part.startswith("kv") else _of_queries(down, norm)
                prefix = f"{path}." if path else ""
                found |= {f"{prefix}{name.replace('down', part)}": mask for name, mask in kept.items()}
    return found


def _of_keys(down: Any, norm: Any) -> dict[str, torch.Tensor]:
    """Constants of a neutral latent of keys and values, whose rows the RoPE key follows.

    Biases of true channels that are zero stay, too: kvfold reads no others.
    """
    gain, weight, bias = norm.weight.detach(), down.weight.detach(), down.bias.detach()
    rank = len(gain)
    constant = constant_channels(gain, weight[:rank], bias[:rank])
    if constant is None:
        return {}
    rows = nn.functional.pad(constant, (0, len(weight) - rank))
    biases = nn.functional.pad(constant | (bias[:rank] == 0), (0, len(bias) - rank))
    return {
        "down.weight": rows[:, None].expand_as(weight),
        "down.bias": biases,
        "kv_a_layernorm.weight": torch.ones_like(gain, dtype=torch.bool),
    }


def _of_queries(down: Any, norm: Any) -> dict[str, torch.Tensor]:
    """Fixed weights of a neutral latent of queries, which is the input itself: everything."""
    gain, weight, bias = norm.weight.detach(), down.weight.detach(), down.bias.detach()
    if not is_query_latent({"q_a_proj.weight": weight, "q_a_proj.bias": bias, "q_a_layernorm.weight": gain}):
        return {}
    still = torch.ones_like(bias, dtype=torch.bool)
    return {"down.weight": still[:, None].expand_as(weight), "down.bias": still, "q_a_layernorm.weight": still}


def without_dropout(model: Any) -> Any:
    """The model with nothing dropped in any mode: the student is compared with its teacher, token by token.

    Classes read rates of dropout from their config, keep copies in their layers, or have modules of it.
    """
    configs = (model.config, model.config.get_text_config(decoder=True))
    for part in {id(part): part for part in (*configs, *model.modules())}.values():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(part, nn.Dropout))):
                setattr(part, name, 0.0)
    return model


def compute_layers_again(student: Any) -> None:
    """Gradient checkpointing, which transformers does in training mode only; in that, nothing else may change."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Newer versions of transformers have another name for it, and warn of this one.
    enable = getattr(student, "activation_checkpointing_enable", None) or student.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in student.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # of this module alone: those in it stay as they are
