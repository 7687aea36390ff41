"""Encodes and decodes tensors in the formats of `attention.formats`, on any device.

Integers are codes in 0 … 2^bits − 1. With an offset, x ≈ offset + scale · code: offset is the smallest value of a group and
scale its range over 2^bits − 1, both rounded to float16. So an error is at most half a scale, plus what that rounding adds.
Without one, x ≈ scale · (code − 2^(bits−1)): the value of largest magnitude over the scale is 127, or −8 of −8 … 7, as in
llama.cpp's `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref`, but for values half-way between two codes of q8_0. Classes
have x ≈ scale · (code − 2^(bits−1) + ½), and bits 7 to 14 of a float16 as their scale. The largest magnitude gives an expected
scale; of it and two on either side, the one with the least squared error is taken.
"""

import math
from typing import NamedTuple

import torch

from attention.formats import Format, Part
from attention.served import RULES, hadamard

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
_INFINITE = 248  # the scale of a class that is infinite


class Encoded(NamedTuple):
    """Encoded values `[…, n]`: codes `[…, bytes]`, and scales and offsets `[…, groups]`, where the format has them."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


def encode(values: torch.Tensor, form: Format, group: int) -> Encoded:
    """`values [..., n]` in a format.

    fp8 is e4m3 with a scale of 1, as engines take it without calibration: values beyond 448 become 448. A group with a value
    that is not finite, or beyond float16, decodes to values that are not finite. What only engines store is rounded instead.

    Args:
        values: In any floating dtype.
        form: The format; n is a multiple of 8 where values take less than a byte.
        group: Consecutive values that share a scale; n where channels have classes.
    """
    if not values.shape[-1]:  # a RoPE key of no dims
        return Encoded(values.to(torch.uint8))
    if form.classes:
        of_classes, scales, _ = _in_classes(values, form)
        return Encoded(torch.cat([_packed(codes, own.bits) for codes, own in of_classes], -1), scales)
    if form.rule:
        return Encoded(RULES[form.rule](values, form.bits))
    if not form.group:
        if form.name == "fp8":
            values = torch.where(values.isfinite(), values.clamp(-_LARGEST_FP8, _LARGEST_FP8), torch.nan)
        return Encoded(values.to(torch.float8_e4m3fn if form.name == "fp8" else getattr(torch, form.name)))
    codes, scales, offsets = _quantised(values.float(), form, group)
    return Encoded(_packed(codes, form.bits), scales, offsets)


def _quantised(given: torch.Tensor, form: Format, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes `[..., n]` in uint8, scales and offsets; arguments as of `encode`, n is any."""
    size, top = given.shape[-1], 2**form.bits - 1
    if form.steps:
        parts = _each_group(given, group, 0)
        exact = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))[..., 0] / form.steps
        inverse = (1 / exact).masked_fill(exact == 0, 0)  # of the scale before it is rounded, as llama.cpp has it
        codes = (given * _spread(inverse, group, size) + (2 ** (form.bits - 1) + 0.5)).floor()
        return codes.nan_to_num(0).clamp(0, top).to(torch.uint8), exact.half(), None
    offsets = _each_group(given, group, torch.inf).amin(-1)
    ranges = _each_group(given, group, -torch.inf).amax(-1) - offsets
    offsets, scales = offsets.half(), (ranges / top).half()
    steps = scales.float().masked_fill(scales == 0, 1)
    codes = ((given - _spread(offsets.float(), group, size)) / _spread(steps, group, size)).round()
    return codes.nan_to_num(0).clamp(0, top).to(torch.uint8), scales, offsets


def _in_classes(values: torch.Tensor, form: Format) -> tuple[list[tuple[torch.Tensor, Format]], torch.Tensor, torch.Tensor]:
    """Encode `values [..., n]`, each class by itself, with the best of five scales.

    Returns:
        Codes of each class, in uint8, with its format; scales `[..., classes]`, in uint8; values `[..., n]` as decoded, fp32.
    """
    classes = form.cut(values.shape[-1])
    parts = _ordered(values, form).float().split([size for _, size in classes], -1)
    ends = [2 ** (own.bits - 1) - 0.5 for own, _ in classes]  # the outermost codes about zero
    shares = [own.outermost(size) / end for (own, size), end in zip(classes, ends, strict=True)]
    exact = torch.stack([part.abs().amax(-1) * shares[i] for i, part in enumerate(parts)], -1)
    expected = exact.half().nan_to_num_(torch.inf, torch.inf).view(torch.int16)[..., None, :] + 127 >> 7  # rounded up
    tried = expected + torch.arange(-2, 3, dtype=torch.int16, device=values.device)[:, None]
    tried = torch.where((expected < _INFINITE) & (tried >= 0) & (tried < _INFINITE), tried, expected)

    def nearest(i: int, part: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Codes about zero of class i."""
        return (part / steps).floor_().add_(0.5).nan_to_num_(0.5).clamp_(-ends[i], ends[i])

    whole, steps = [part[..., None, :] for part in parts], _widened(tried)[..., None].unbind(-2)
    errors = [(nearest(i, part, steps[i]) * steps[i] - part).square_().sum(-1) for i, part in enumerate(whole)]
    scales = tried.gather(-2, torch.stack(errors, -1).argmin(-2, keepdim=True)).squeeze(-2)
    best = _widened(scales)[..., None].unbind(-2)
    codes = [nearest(i, part, best[i]) for i, part in enumerate(parts)]
    read = _restored(torch.cat([each * best[i] for i, each in enumerate(codes)], -1), form)
    stored = [((codes[i] + ends[i]).to(torch.uint8), own) for i, (own, _) in enumerate(classes)]
    return stored, scales.to(torch.uint8), read


def decode(stored: Encoded, form: Format, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The values `[..., n]` of what `encode` returned with the same format and group."""
    if stored.scales is None:
        return stored.codes.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if form.classes:
        classes = form.cut(group)
        codes = stored.codes.split([size * own.bits // 8 for own, size in classes], -1)
        parts = zip(classes, codes, _widened(stored.scales).split(1, -1), strict=True)
        read = [
            _unpacked(part, own.bits).to(wide).sub_(2 ** (own.bits - 1) - 0.5).mul_(scale) for (own, _), part, scale in parts
        ]
        return _restored(torch.cat(read, -1), form).to(dtype)
    codes = _unpacked(stored.codes, form.bits).to(wide)
    return _read(codes, stored.scales, stored.offsets, form, group).to(dtype)


def _read(codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, form: Format, group: int) -> torch.Tensor:
    """The values of codes `[..., n]` in a floating dtype, which change."""
    size = codes.shape[-1]
    width = math.gcd(group, size)  # the last group of a token may be a part of one
    of_group, scales = codes.unflatten(-1, (-1, width)), _spread(scales, group // width, size // width)[..., None]
    if offsets is None:
        return of_group.sub_(2 ** (form.bits - 1)).mul_(scales).flatten(-2)
    return of_group.mul_(scales).add_(_spread(offsets, group // width, size // width)[..., None]).flatten(-2)


def _widened(scales: torch.Tensor) -> torch.Tensor:
    """In float32, positive float16 of which eight bits are kept: five of the exponent and three behind the point."""
    return (scales.to(torch.int16) << 7).view(torch.float16).float()


def rotated(values: torch.Tensor, size: int) -> torch.Tensor:
    """`values [..., n]` with each `size` of them multiplied by an orthogonal Hadamard matrix, its own inverse, in fp32."""
    return hadamard(values.float() * (1 / math.sqrt(size)), size)


def rounded(states: torch.Tensor, form: Format, part: Part) -> torch.Tensor:
    """A part of a cache `[..., T, n]` as it is read.

    Gradients pass as if nothing were rounded (the straight-through estimator, arXiv 1308.3432).
    """
    form = form.of(part)
    group, rotation = form.grouping(part, states.shape[-1])
    if rotation == 1:
        return _rounded(states, form, group)
    return rotated(_rounded(rotated(states, rotation), form, group), rotation).to(states.dtype)


def _rounded(values: torch.Tensor, form: Format, group: int) -> torch.Tensor:
    """Values `[..., n]`, encoded and decoded, of which `group` share a scale."""
    with torch.no_grad():
        if form.classes and values.shape[-1]:
            read = _in_classes(values, form)[2].to(values.dtype)
        elif form.group:
            codes, scales, offsets = _quantised(values.float(), form, group)
            wide = torch.promote_types(values.dtype, torch.float32)
            read = _read(codes.to(wide), scales, offsets, form, group).to(values.dtype)
        else:
            read = decode(encode(values, form, group), form, group, values.dtype)
    return values + (read - values).detach() if values.requires_grad else read


def _ordered(values: torch.Tensor, form: Format) -> torch.Tensor:
    """Channels `[..., n]` in the order of their classes."""
    return values.unflatten(-1, (2, -1)).flip(-1).mT.flatten(-2) if form.paired else values


def _restored(values: torch.Tensor, form: Format) -> torch.Tensor:
    """The inverse of `_ordered`."""
    return values.unflatten(-1, (-1, 2)).mT.flip(-1).flatten(-2) if form.paired else values


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
    apart = codes.unflatten(-1, (-1, 8)).to(torch.int32 if bits <= 4 else torch.int64)
    shifts = bits * torch.arange(8, device=codes.device, dtype=apart.dtype)
    word = (apart << shifts).sum(-1, dtype=torch.int64)
    shifted = word[..., None] >> 8 * torch.arange(bits, device=codes.device)
    return (shifted & 255).to(torch.uint8).flatten(-2)


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_packed`: the upper half of a word's integers moves to the upper half of its bytes, and so on within
    halves, until each integer has a byte.
    """
    if bits == 8:
        return codes
    if bits in (3, 5, 6, 7):  # crosses bytes
        kind, size = (torch.int32, 4) if bits == 6 else (torch.int64, 8)
        held = bits * size // 8  # bytes of so many integers
        word = torch.nn.functional.pad(codes.unflatten(-1, (-1, held)), (0, size - held)).view(kind)[..., 0]
    else:
        word = codes.to({4: torch.int16, 2: torch.int32, 1: torch.int64}[bits])
    size = part = word.element_size()  # integers of a word, and of the parts that it is divided into
    while part > 1:
        part //= 2
        lower = sum((1 << bits * part) - 1 << at for at in range(0, 8 * size, 8 * part))
        if bits > 4:  # halves would overlap while they move
            stays = sum((1 << bits * part) - 1 << at for at in range(0, 8 * size, 16 * part))
            word = (word & stays).bitwise_or_((word >> bits * part).bitwise_and_(stays) << 8 * part)
        else:
            word = word.bitwise_or_(word << (8 - bits) * part).bitwise_and_(lower)
    return word.contiguous().view(torch.uint8)
