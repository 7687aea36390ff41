"""Compares a kernel with torch on the current device: a kernel that was built may still be wrong there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from attention.kernels import torch_decode
from attention.kernels.operators import gqa_decode, mla_decode
from attention.kernels.tiling import Shape, choose, machine
from attention.stored import stored_pair

_BATCH, _CACHED, _PROGRAMS = 3, 700, 4  # each program gets several tiles, and each sequence several programs


@torch.no_grad()
def deviation(shape: Shape, device: str) -> float:
    """The relative error of the kernel for calls of `shape`, compared with torch in fp64 on the same numbers.

    The inputs are random but the same each time, and torch's generators stay untouched; of three sequences one is padded on the
    left and one on the right.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(shape.dtype)

    heads, rank, rope, groups, form = *shape[:4], shape.form
    tiling = choose(heads, rank, rope, shape.dtype.itemsize, machine(torch.device(device)))
    assert tiling is not None
    tiling = replace(tiling, programs=_PROGRAMS)
    scaling = (rank + rope) ** -0.5
    # While a model is exported or traced, tensors have no values; here they need some. (Autocast leaves fp64 alone.)
    with _disable_current_modes():
        mask = None if shape.mask is None else _mask(shape.mask, device)
        wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
        if groups is None:
            q, r = draw(_BATCH, heads, 1, rank), draw(_BATCH, heads, 1, rope)
            c, k = stored_pair(draw(_BATCH, 1, _CACHED, rank), draw(_BATCH, 1, _CACHED, rope), form, True)
            found = mla_decode(q, r, c, k, mask, scaling, tiling)
            expected = torch_decode.decode(q.double(), r.double(), c[:, 0].double(), k[:, 0].double(), wide, scaling)
        else:
            q = draw(_BATCH, groups * heads, 1, rope)
            v, k = stored_pair(draw(_BATCH, groups, _CACHED, rank), draw(_BATCH, groups, _CACHED, rope), form, False)
            found = gqa_decode(q, k, v, mask, scaling, tiling)
            expected = torch_decode.decode_grouped(q.double(), k.double(), v.double(), wide, scaling)
        return float((found.double() - expected).norm() / expected.norm())


def _mask(kind: torch.dtype, device: str) -> torch.Tensor:
    first = torch.tensor([0, 70, 0], device=device)[:, None]
    end = torch.tensor([_CACHED, _CACHED, 470], device=device)[:, None]
    tokens = torch.arange(_CACHED, device=device)
    seen = ((tokens >= first) & (tokens < end))[:, None, None]
    return seen if kind == torch.bool else torch.zeros(seen.shape, dtype=kind, device=device).masked_fill(~seen, -torch.inf)


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding explains, with a margin: 0.4 % in fp16, 3 % in bf16, 0.01 % in fp32."""
    return max(4 * torch.finfo(dtype).eps, 1e-4)
