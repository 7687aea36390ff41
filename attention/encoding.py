"""Encodes and decodes tensors in the formats of `attention.formats`, on any device.

Integers are asymmetric: x ≈ offset + scale · code, with code in 0 … 2^bits − 1, offset the smallest value of a group and scale
its range over 2^bits − 1, both rounded to float16. So an error is at most half a scale, plus what that rounding adds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from attention.formats import Format

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


class Encoded(NamedTuple):
    """Encoded values `[…, n]`: codes `[…, bytes]`, and scales and offsets `[…, groups]`, which plain dtypes have none of."""

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
    if stored.scales is None or stored.offsets is None:
        fp8 = stored.codes.dtype == torch.float8_e4m3fn
        return (_from_fp8(stored.codes) if fp8 else stored.codes).to(dtype)
    codes = integers(stored, form, torch.promote_types(dtype, torch.float32))
    size = codes.shape[-1]
    width = math.gcd(group, size)  # the last group of a token may be a part of one
    offsets, scales = (_spread(part, group // width, size // width) for part in (stored.offsets, stored.scales))
    return codes.unflatten(-1, (-1, width)).mul_(scales[..., None]).add_(offsets[..., None]).flatten(-2).to(dtype)


def integers(stored: Encoded, form: Format, dtype: torch.dtype) -> torch.Tensor:
    """The codes `[..., n]` of integers of a few bits, as numbers of `dtype` in a new tensor."""
    return _unpacked(stored.codes, form.bits).to(dtype)


def _dtype(form: Format) -> torch.dtype:
    found: torch.dtype = torch.float8_e4m3fn if form.name == "fp8" else getattr(torch, form.name)
    return found


def _spread(parts: torch.Tensor, group: int, size: int) -> torch.Tensor:
    """One number per group, `[..., groups]`, for each of its values: `[..., size]`."""
    return parts[..., None].expand(*parts.shape, group).flatten(-2)[..., :size]


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
    """The inverse of `_packed`: the upper half of a word's integers moves to the upper half of its bytes, and so on within
    halves, until each integer has a byte.
    """
    if bits == 8:
        return codes
    if bits == 3:  # crosses bytes
        parts = codes.unflatten(-1, (-1, 3)).long()
        word = parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16
    else:
        word = codes.to(torch.int16 if bits == 4 else torch.int32)
    size = part = word.element_size()  # integers of a word, and of the parts that it is divided into
    while part > 1:
        part //= 2
        lower = sum((1 << bits * part) - 1 << at for at in range(0, 8 * size, 8 * part))
        word = word.bitwise_or_(word << (8 - bits) * part).bitwise_and_(lower)
    return word.contiguous().view(torch.uint8)


def _from_fp8(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 in float32. On a CPU, where torch converts one value at a time, by way of float16, whose bits are the same further
    left, but for 8 more in the exponent's bias, and NaN.
    """
    if codes.device.type != "cpu" or not codes.numel() or bool((codes.view(torch.uint8) & 127).amax() == 127):
        return codes.float()
    half = (codes.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)  # of the sign's copies, one is left
    return half.view(torch.float16).float() * 2**8
