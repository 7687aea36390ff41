"""Latents whose RMSNorm returns its input, because constant channels alone determine the root mean square.

A constant channel has a zero row in the projection, and a bias so large that it outweighs all else: √(Σ b² / R) = w. The norm's
weight is w on the other channels, the true ones, which undoes the division, and 0 on the constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LEAST_WEIGHT = 2.0**8  # smaller ones are those of trained norms
_ROUNDING = 2.0**-8  # relative: bfloat16 rounds constants by up to 2⁻⁹


def constant_channels(weight: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """The constant channels of a latent whose norm is neutral.

    Args:
        weight: `[R]`, the norm's.
        down: `[R, E]`, the projection to the latent.
        bias: `[R]`, of the projection. True channels may have one, too.

    Returns:
        `[R]` bool, or None if the norm has an effect.
    """
    weight, constant = weight.double(), weight == 0
    if not bool(constant.any()) or bool(down[constant].any()):
        return None
    return constant if undone(weight[~constant], bias[constant], len(weight)) else None


def undone(weights: torch.Tensor, constants: torch.Tensor, rank: int) -> bool:
    """Whether a norm's weights undo its division by the root mean square of R channels, of which these are the constants."""
    if not len(weights) or bool((weights != weights[0]).any()) or not bool(weights[0] >= LEAST_WEIGHT):
        return False
    return is_size(weights[0], constants, rank)


def is_size(value: torch.Tensor, constants: torch.Tensor, rank: int) -> bool:
    """Whether a value is the root mean square of R channels, of which these are the constants."""
    size = (constants.double().square().sum() / rank).sqrt()
    return bool((value.double() / size - 1).abs() < _ROUNDING)
