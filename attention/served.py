"""Rounds values as vLLM 0.33 and SGLang 0.5.23 do, whose caches have formats of their own.

On a CPU, all is bit for bit what their code gives, but for keys of TurboQuant. vLLM turns these by a matrix product, whose sums
depend on how many tokens there are; sums in a fixed order give one vector in 10,000 another code.

Every function takes values `[..., n]` of a token's head or latent in the model's dtype, and returns those that the engine's
attention computes with, in fp32. Rotations are undone: engines turn queries and outputs instead, which is the same.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch

_SIGNS = 0x9E3779B9  # vLLM's seed
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of FP4


def hadamard(values: torch.Tensor, size: int) -> torch.Tensor:
    """Values `[..., n]` with each `size` of them multiplied by a Hadamard matrix of ones and minus ones.

    In additions, whose order does not depend on how many tokens there are. `size` is a power of two that divides n.
    """
    half = 1
    while half < size:
        one, other = values.unflatten(-1, (-1, 2, half)).unbind(-2)
        values, half = torch.stack((one + other, one - other), -2).flatten(-3), 2 * half
    return values


def _per_token_head(values: torch.Tensor, bits: int) -> torch.Tensor:
    """`int4_per_token_head`: behind random signs and a Hadamard matrix, with a scale and an integer zero point for a head."""
    size = values.shape[-1] & -values.shape[-1]
    signs = torch.bernoulli(torch.full((size,), 0.5), generator=torch.Generator().manual_seed(_SIGNS)) * 2 - 1
    signs = signs.to(values.device).repeat(values.shape[-1] // size)
    turned = hadamard(values.float() * signs, size).to(values.dtype).float()
    lowest, highest, top = turned.amin(-1, keepdim=True), turned.amax(-1, keepdim=True), 2.0**bits - 1
    scale = ((highest - lowest) / top).clamp_min(1e-6)
    zero = _half_away(-lowest / scale).clamp(0, top)
    codes = _half_away(turned * (1 / scale) + zero).clamp(0, top)
    kept = (scale.view(torch.int32) & -16).view(torch.float32)  # whose last four bits hold the zero point
    return hadamard((codes - zero) * kept, size) / size * signs


def _half_away(values: torch.Tensor) -> torch.Tensor:
    return (values + torch.where(values >= 0, 0.5, -0.5)).trunc()


def _turboquant_keys(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Keys of `turboquant_*_nc` (arXiv 2504.19874): a norm, and a unit vector behind a Hadamard matrix, which stays one."""
    values, size = values.float(), values.shape[-1]
    norms, centroids = values.norm(dim=-1, keepdim=True), _lloyd_max(size, bits).to(values.device)
    unit = hadamard(values / (norms + 1e-8), size) / math.sqrt(size)
    read = centroids[torch.bucketize(unit, (centroids[:-1] + centroids[1:]) / 2, right=True)]
    read = read * (1 / torch.sqrt(read.square().sum(-1, keepdim=True) + 1e-16))
    return hadamard(norms.half().float() * read, size) / math.sqrt(size)


@cache
def _lloyd_max(size: int, bits: int) -> torch.Tensor:
    """`[2^bits]`: the centroids of N(0, 1 / size) to which vLLM's iteration comes, by trapezoids of 200 steps."""
    sigma, levels = math.sqrt(1 / size), 2**bits
    found = torch.tensor([sigma * 7 * ((i + 0.5) / levels - 0.5) for i in range(levels)], dtype=torch.float64)
    ends = torch.tensor([10.5 * sigma], dtype=torch.float64)
    for _ in range(200):
        edges = torch.cat((-ends, (found[:-1] + found[1:]) / 2, ends))
        points = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] / 200 * torch.arange(201)
        density = torch.exp(points.square() / (-2 / size))
        density[:, 0], density[:, -1] = density[:, 0] / 2, density[:, -1] / 2
        moved = (points * density).sum(1) / density.sum(1)
        if (moved - found).abs().max() < 1e-10:
            break
        found = moved
    return found.float()


def _turboquant_values(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of `turboquant_*_nc`: even steps, by an exact scale, read with one in float16."""
    values, top = values.float(), 2**bits - 1
    lowest = values.amin(-1, keepdim=True)
    scale = ((values.amax(-1, keepdim=True) - lowest) / top).clamp_min(1e-8)
    codes = ((values - lowest) / scale + 0.5).trunc().clamp(0, top)
    return codes * scale.half().float() + lowest.half().float()


def _nvfp4(values: torch.Tensor, bits: int) -> torch.Tensor:
    """`nvfp4` with a global scale of 1: blocks of 16 in FP4, ties to even, with a scale in e4m3."""
    parts = _blocks(values)
    scale = (parts.abs().amax(-1, keepdim=True) * (1 / _E2M1[-1])).clamp_max(448.0).to(torch.float8_e4m3fn).float()
    scaled = parts * (1 / (scale + (scale == 0) * 1e8))
    even, bounds = torch.tensor([False, True] * 4)[:7], scaled.new_tensor(_BOUNDS)
    magnitudes = scaled.abs().clamp_max(_E2M1[-1])
    index = (magnitudes[..., None] > bounds).sum(-1) + ((magnitudes[..., None] == bounds) & even.to(values.device)).sum(-1)
    return (scaled.new_tensor(_E2M1)[index] * scaled.sign() * scale).flatten(-2)[..., : values.shape[-1]]


def _mx_block16(values: torch.Tensor, bits: int) -> torch.Tensor:
    """`fp4_mx_block16`: blocks of 16 in FP4, ties away from zero, with a power of two."""
    parts = _blocks(values)
    exponent = torch.ceil(torch.log2((parts.abs().amax(-1, keepdim=True) / _E2M1[-1]).clamp_min(1e-10)))
    scaled = parts / torch.exp2(exponent)
    index = (scaled.abs()[..., None] >= scaled.new_tensor(_BOUNDS)).sum(-1)
    read = scaled.new_tensor(_E2M1)[index]
    return (torch.where(scaled < 0, -read, read) * torch.exp2(exponent)).flatten(-2)[..., : values.shape[-1]]


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Blocks of 16; fits leave out the constant channel of a latent, so that the last one may lack values."""
    return torch.nn.functional.pad(values.float(), (0, -values.shape[-1] % 16)).unflatten(-1, (-1, 16))


_BOUNDS = tuple((a + b) / 2 for a, b in pairwise(_E2M1))
RULES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "per token and head": _per_token_head,
    "turboquant keys": _turboquant_keys,
    "turboquant values": _turboquant_values,
    "nvfp4": _nvfp4,
    "mx block 16": _mx_block16,
}
