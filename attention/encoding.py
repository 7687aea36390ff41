"""Encodes and decodes tensors in the formats of `attention.formats`, on any device.

Integers are codes in 0 … 2^bits − 1. With an offset, x ≈ offset + scale · code: offset is the smallest value of a group and
scale its range over 2^bits − 1, both rounded to float16. So an error is at most half a scale, plus what that rounding adds.
Without one, x ≈ scale · (code − 2^(bits−1)): the value of largest magnitude over the scale is 127, or −8 of −8 … 7, as in
llama.cpp's `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref`, but for values half-way between two codes of q8_0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attention.formats import Format

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


class Encoded(NamedTuple):
    """Encoded values `[…, n]`: codes `[…, bytes]`, and scales and offsets `[…, groups]`, where the format has them."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(part.nbytes for part in self if part is not None)


def encode(values: torch.Tensor, form: Format, group: int, seen: torch.Tensor | None = None) -> Encoded:
    """`values [..., n]` in a format.

    fp8 is e4m3 with a scale of 1, as engines take it without calibration: values beyond 448 become 448. A group with a value
    that is not finite, or beyond float16, decodes to values that are not finite.

    Args:
        values: In any floating dtype.
        form: The format; n is a multiple of 8 where values take less than a byte.
        group: Consecutive values that share a scale.
        seen: `[..., n]`, broadcast; false for values that no scale should count. None for all.
    """
    if not form.group:
        if form.name == "fp8":
            values = torch.where(values.isfinite(), values.clamp(-_LARGEST_FP8, _LARGEST_FP8), torch.nan)
        return Encoded(values.to(_dtype(form)))
    given, size, top = values.float(), values.shape[-1], 2**form.bits - 1
    if form.steps:
        parts = _each_group(given if seen is None else given.where(seen, 0), group, 0)
        exact = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))[..., 0] / form.steps
        inverse = (1 / exact).masked_fill(exact == 0, 0)  # of the scale before it is rounded, as llama.cpp has it
        codes = (given * _spread(inverse, group, size) + (2 ** (form.bits - 1) + 0.5)).floor()
        return Encoded(_packed(codes.nan_to_num(0).clamp(0, top).to(torch.uint8), form.bits), exact.half())
    low, high = given, given
    if seen is not None:
        low, high = given.where(seen, torch.inf), given.where(seen, -torch.inf)
    offsets = _each_group(low, group, torch.inf).amin(-1)
    ranges = _each_group(high, group, -torch.inf).amax(-1) - offsets
    if seen is not None:  # a group of which nothing counts
        unseen = offsets == torch.inf
        offsets, ranges = offsets.masked_fill(unseen, 0), ranges.masked_fill(unseen, 0)
    offsets, scales = offsets.half(), (ranges / top).half()
    steps = scales.float().masked_fill(scales == 0, 1)
    codes = ((given - _spread(offsets.float(), group, size)) / _spread(steps, group, size)).round()
    return Encoded(_packed(codes.nan_to_num(0).clamp(0, top).to(torch.uint8), form.bits), scales, offsets)


def decode(stored: Encoded, form: Format, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The values `[..., n]` of what `encode` returned with the same format and group."""
    if stored.scales is None:
        return stored.codes.to(dtype)
    codes = _unpacked(stored.codes, form.bits)
    scales = _spread(stored.scales.float(), group, codes.shape[-1])
    if stored.offsets is None:
        return ((codes.float() - 2 ** (form.bits - 1)) * scales).to(dtype)
    return torch.addcmul(_spread(stored.offsets.float(), group, codes.shape[-1]), codes.float(), scales).to(dtype)


def rotated(values: torch.Tensor, size: int) -> torch.Tensor:
    """`values [..., n]` with each `size` of them multiplied by a Hadamard matrix, which is its own inverse, in fp32.

    In additions, whose order does not depend on how many tokens there are. `size` is a power of two that divides n.
    """
    found, half = values.float() * (1 / math.sqrt(size)), 1
    while half < size:
        one, other = found.unflatten(-1, (-1, 2, half)).unbind(-2)
        found, half = torch.stack((one + other, one - other), -2).flatten(-3), 2 * half
    return found


def _dtype(form: Format) -> torch.dtype:
    found: torch.dtype = torch.float8_e4m3fn if form.name == "fp8" else getattr(torch, form.name)
    return found


def _spread(parts: torch.Tensor, group: int, size: int) -> torch.Tensor:
    """One number per group, `[..., groups]`, for each of its values: `[..., size]`."""
    return parts.repeat_interleave(group, -1)[..., :size]


def _each_group(values: torch.Tensor, group: int, filler: float) -> torch.Tensor:
    """`[..., n]` as `[..., groups, group]`; the last group is filled up."""
    missing = -values.shape[-1] % group
    return torch.nn.functional.pad(values, (0, missing), value=filler).unflatten(-1, (-1, group))


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers `[..., n]` of some bits, in uint8, as bytes `[..., n · bits / 8]`."""
    if bits == 8:
        return codes
    apart = codes.unflatten(-1, (-1, 8)).int()
    shifts = bits * torch.arange(8, device=codes.device, dtype=torch.int32)
    word = (apart << shifts).sum(-1, dtype=torch.int64)
    shifted = word[..., None] >> 8 * torch.arange(bits, device=codes.device)
    return (shifted & 255).to(torch.uint8).flatten(-2)


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_packed`."""
    if bits == 8:
        return codes
    if bits == 3:  # crosses bytes
        parts = codes.unflatten(-1, (-1, 3)).int()
        word = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16
        shifts = 3 * torch.arange(8, device=codes.device, dtype=torch.int32)
        return (word[..., None] >> shifts & 7).flatten(-2)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return (codes[..., None] >> shifts & 2**bits - 1).flatten(-2)
