"""Constant channels that switch the RMSNorm of a latent off: the root mean square becomes 2^k, and gains of 2^k undo it.

A constant is a zero row of the projection with a bias of 2^k times its value. All other channels are true: they come out as
they went in, up to an exponent shift.

2^k is as large as float16 allows, and a latent's root mean square should be about 2^k / 2^12 (`latent_size`). A larger one
changes the norm by more than one ulp of float32. A smaller one, divided by 2^k, has few bits left in float16.

Two latents need this. That of keys and values caches all of its channels, so it has as few constants as possible. That of
queries is not cached. kvfold uses it where queries have biases, for which DeepSeek-V3's class has no place: the latent is the
input itself and a constant one, and the projection behind it is [W_Q | b].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_LEAST = 2.0**8  # smaller gains are those of trained norms
_ROUNDING = 2.0**-8  # relative: bfloat16 rounds constants by up to 2⁻⁹
_MOST = 65280.0  # the largest bfloat16 that is finite in float16
_RATIO = 2.0**12  # of constants and latents
_MULTIPLE = 16  # of the rank of queries, as matrix products on GPUs want it
_SQUARES = 4  # of integers: every number is a sum of so many (Lagrange, 1770)


def constants(rank: int) -> list[float]:
    """The values of the constant channels, without the factor 2^k: they make the root mean square of R channels one.

    One, √R, if its rounding to bfloat16 errs by less than half a unit in the last place of every bfloat16 (1/510 upwards,
    1/512 downwards), because then dividing by the root mean square rounds back to the original bits. Otherwise
    two: √R rounded down, and the root of what its square lacks, which leaves an error of about 2⁻¹⁶.
    """
    root = math.sqrt(rank)
    unit = 2.0 ** (math.frexp(root)[1] - 8)  # bfloat16 has eight bits
    error = root / (round(root / unit) * unit) - 1
    if -1 / 512 + 1e-6 < error < 1 / 510 - 1e-6:
        return [root]
    first = math.floor(root / unit) * unit
    return [first, math.sqrt(rank - first**2)]


def level(values: Sequence[float]) -> float:
    """2^k for constants of these values."""
    return 2.0 ** math.floor(math.log2(_MOST / max(values)))


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
    if not bool(constant.any()) or bool(constant.all()) or bool(down[constant].any()):
        return None
    true, size = weight[~constant], (bias[constant].double().square().sum() / len(weight)).sqrt()
    undone = bool((true == true[0]).all()) and float(true[0]) >= _LEAST and bool((true[0] / size - 1).abs() < _ROUNDING)
    return constant if undone else None


def latent_size(values: Sequence[float]) -> float:
    """The root mean square, a power of two, that a latent should have beside constants of these values."""
    return level(values) / _RATIO


def query_rank(width: int) -> int:
    """The rank of a latent of queries that holds an input of E = `width` dims and the constants."""
    return -(-(width + 1 + _SQUARES) // _MULTIPLE) * _MULTIPLE


def query_constants(rank: int) -> list[float]:
    """The values of the constant channels of queries, which come last: the one that biases ride on, then what the norm needs.

    All are integers whose squares sum to the rank, which every dtype holds: the norm is neutral bit for bit in bfloat16, and
    to one unit in the last place in float32.
    """
    found = _squares(rank - 1, _SQUARES)
    assert found is not None
    return [1.0, *(float(value) for value in found if value)]


def query_latent(width: int, scale: float, like: torch.Tensor, large: float | None = None) -> dict[str, torch.Tensor]:
    """`q_a_proj` and `q_a_layernorm` of a latent of the input times `scale`, and the constants.

    Args:
        width: E.
        scale: A power of two.
        like: Its dtype and device are those of the tensors.
        large: 2^k; `level` of the constants if None.
    """
    rank = query_rank(width)
    constant = like.new_tensor(query_constants(rank))
    large = level(query_constants(rank)) if large is None else large
    gain, bias = like.new_full((rank,), large), like.new_zeros(rank)
    gain[-len(constant) :] = 0
    gain[-len(constant)] = 1  # 1 · 2^k divided by 2^k
    bias[-len(constant) :] = constant * large
    weight = like.new_zeros(rank, width).fill_diagonal_(scale)
    return {"q_a_proj.weight": weight, "q_a_proj.bias": bias, "q_a_layernorm.weight": gain}


def query_scale(weight: torch.Tensor) -> float:
    """The scale for inputs of `weight [n, E]`, a power of two: `latent_size`, if they make queries of about one."""
    size = float(weight.double().square().sum(1).mean().sqrt())
    wanted = latent_size(query_constants(query_rank(weight.shape[1]))) * size
    return 2.0 ** max(-12, min(12, round(math.log2(wanted)))) if 0 < wanted < math.inf else 1.0


def is_query_latent(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether these `q_a_proj` and `q_a_layernorm` are the input times a scale, and constants that are large enough."""
    weight, gain = tensors["q_a_proj.weight"], tensors["q_a_layernorm.weight"]
    expected = query_latent(weight.shape[1], float(weight[0, 0]), weight, float(gain[0]))
    same = all(
        tensors[name].shape == tensor.shape and bool((tensors[name] == tensor).all()) for name, tensor in expected.items()
    )
    return same and float(gain[0]) >= _LEAST and float(weight[0, 0]) > 0


def join_query_bias(weight: torch.Tensor, bias: torch.Tensor, rank: int) -> torch.Tensor:
    """`q_b_proj.weight [n, rank]` of queries that read a latent by `weight [n, channels]`, and have `bias [n]`."""
    joined = weight.new_zeros(len(weight), rank)
    joined[:, : weight.shape[1]] = weight
    joined[:, -len(query_constants(rank))] = bias
    return joined


def split_query_bias(joined: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `join_query_bias` where the latent is an input of `width` dims, as views: `[n, E]` and `[n]`."""
    return joined[:, :width], joined[:, -len(query_constants(joined.shape[1]))]


def _squares(total: int, count: int) -> list[int] | None:
    """`count` integers whose squares sum to `total`, the first as large as possible; or None."""
    largest = math.isqrt(total)
    if count == 1:
        return [largest] if largest**2 == total else None
    for first in range(largest, -1, -1):
        if rest := _squares(total - first**2, count - 1):
            return [first, *rest]
    return None
