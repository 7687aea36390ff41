"""Cached numbers as the Triton kernels read them: a tensor, or the parts of an encoded cache (`attention.stored`)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from attention.stored import Groups, Stored

Kind = Literal["plain", "fp8", "rows", "groups"]


class Operand(NamedTuple):
    """Cached `[N, S, n]`; N are sequences, or the KV heads of all sequences.

    Attributes:
        codes: `[N, S, n]`; of integers in bytes `[N, S, …]`, or with a span `[N, S / span, n, …]`, without the newest.
        scales: `[N, S, groups]`, or `[N, S / span, n]`; None for floats.
        offsets: Likewise, of the same strides.
        opened: With a span, the newest tokens `[N, 1 … span, n]`, in full precision.
        bits: Of an integer.
        group: How many channels share a scale.
        span: How many tokens share a scale per channel; 0 where each token is encoded by itself.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    opened: torch.Tensor | None = None
    bits: int = 8
    group: int = 0
    span: int = 0

    @property
    def kind(self) -> Kind:
        """How the kernels read it."""
        if self.scales is None:
            return "fp8" if self.codes.dtype == torch.uint8 else "plain"
        return "groups" if self.span else "rows"

    @property
    def size(self) -> int:
        """The channels n."""
        return self.codes.shape[2] * 8 // self.bits if self.kind == "rows" else self.codes.shape[2]

    @property
    def closed(self) -> int:
        """Tokens in `codes`."""
        return self.codes.shape[1] * (self.span or 1)

    @property
    def tokens(self) -> int:
        """S."""
        return self.closed + (0 if self.opened is None else self.opened.shape[1])


def operand(cached: torch.Tensor) -> Operand:
    """`cached [B, G, S, n]`, with B and G as one dim."""
    if not isinstance(cached, Stored):
        return Operand(_joined(cached))
    held = cached.cached
    if isinstance(held, Groups):
        return _of_groups(held)
    codes, scales, offsets = (None if part is None else _joined(part) for part in held.encoded)
    assert codes is not None
    if scales is None:
        return Operand(codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes)
    assert held.rotation == 1, "kernels read formats that rotate nothing"
    return Operand(codes, scales, offsets, bits=held.form.bits, group=held.group)


def _of_groups(held: Groups) -> Operand:
    opened, form = held.opened.contiguous().flatten(0, 1), held.form
    if held.closed is None:
        codes = opened.new_empty((len(opened), 0, opened.shape[2], form.tokens * form.bits // 8), dtype=torch.uint8)
        scales = offsets = opened.new_empty((len(opened), 0, opened.shape[2]), dtype=torch.float16)
    else:
        codes, scales, offsets = (_joined(part) for part in held.closed if part is not None)
        scales, offsets = scales.flatten(2), offsets.flatten(2)
    return Operand(codes, scales, offsets, opened, form.bits, span=form.tokens)


def parts(cached: torch.Tensor) -> list[torch.Tensor]:
    """The tensors `[B, G, …]` that `operand` reads where they lie."""
    if not isinstance(cached, Stored):
        return [cached]
    held = cached.cached
    encoded = held.closed if isinstance(held, Groups) else held.encoded
    return [] if encoded is None else [part for part in encoded if part is not None]


def _joined(part: torch.Tensor) -> torch.Tensor:
    return part.view(-1, *part.shape[2:])
