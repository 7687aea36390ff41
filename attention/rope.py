"""Rotary position embedding: which dims of a head turn, how fast, and how they pair up (RoFormer, arXiv 2104.09864).

Scaled frequencies come from transformers' own table of scaling types. A class that scales in a way of its own
(HunYuan's `alpha`, Phi-3.5-MoE's `mscale`) is not described by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotary:
    """The first `2 * len(frequencies)` dims of every head turn; the rest do not.

    Attributes:
        frequencies: `[P/2]` radians per token, fp64.
        pairing: Which two dims form pair i of P/2: "half" (i, i + P/2), as Llama; "interleaved" (2i, 2i + 1), as GPT-J.
        attention_factor: What cosine and sine are multiplied by (YaRN, LongRoPE); 1 otherwise.
    """

    frequencies: torch.Tensor
    pairing: Pairing = "half"
    attention_factor: float = 1.0

    @property
    def dims(self) -> int:
        return 2 * len(self.frequencies)

    def rotate(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn `states [..., T, D]` by `positions [T]`; the dims beyond P come back as they are."""
        turning, still = states[..., : self.dims], states[..., self.dims :]
        axis = -2 if self.pairing == "half" else -1
        shape = (2, len(self.frequencies)) if self.pairing == "half" else (len(self.frequencies), 2)
        first, second = turning.unflatten(-1, shape).unbind(axis)  # [..., T, P/2] each
        angles = positions[:, None].double() * self.frequencies.to(positions.device)  # [T, P/2]
        cos, sin = ((f(angles) * self.attention_factor).to(states.dtype) for f in (torch.cos, torch.sin))
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), axis).flatten(-2)
        return torch.cat((turned, still), -1)


def from_config(
    config: Any, head_dim: int, pairing: Pairing = "half", layer_type: str | None = None, partial: bool = False
) -> Rotary:
    """The rotary embedding that a transformers config describes.

    Args:
        config: Its `rope_parameters` are read (rope_theta, rope_type, partial_rotary_factor and scaling).
        head_dim: D.
        pairing: Which dims turn together; configs do not say.
        layer_type: Which entry to take where the config gives each layer type ("full_attention", …) its own.
        partial: Whether the class heeds `partial_rotary_factor` without scaling; most do not.
    """
    parameters = config.rope_parameters
    if layer_type in parameters:
        parameters = parameters[layer_type]
    else:
        layer_type = None
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        dims = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0)) if partial else head_dim
        exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
        return Rotary(parameters["rope_theta"] ** -exponents, pairing)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
    return Rotary(frequencies.double(), pairing, float(factor))
