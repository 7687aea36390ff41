"""Cached numbers as the Triton kernels read them: a tensor, or the parts of an encoded cache (`attention.stored`)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from attention.stored import Stored

Kind = Literal["plain", "fp8", "rows"]


class Operand(NamedTuple):
    """Cached `[N, S, n]`; N are sequences, or the KV heads of all sequences.

    Attributes:
        codes: `[N, S, n]`; of integers in bytes `[N, S, …]`.
        scales: `[N, S, groups]`; None for floats.
        offsets: Likewise, of the same strides.
        bits: Of an integer.
        group: How many channels share a scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    bits: int = 8
    group: int = 0

    @property
    def kind(self) -> Kind:
        """How the kernels read it."""
        if self.scales is None:
            return "fp8" if self.codes.dtype == torch.uint8 else "plain"
        return "rows"

    @property
    def size(self) -> int:
        """The channels n."""
        return self.codes.shape[2] * 8 // self.bits if self.kind == "rows" else self.codes.shape[2]

    @property
    def tokens(self) -> int:
        """S."""
        return self.codes.shape[1]


def operand(cached: torch.Tensor) -> Operand:
    """`cached [B, G, S, n]`, with B and G as one dim."""
    if not isinstance(cached, Stored):
        return Operand(_joined(cached))
    held = cached.cached
    codes, scales, offsets = (None if part is None else _joined(part) for part in held.encoded)
    assert codes is not None
    if scales is None:
        return Operand(codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes)
    assert held.rotation == 1, "kernels read formats that rotate nothing"
    return Operand(codes, scales, offsets, bits=held.form.bits, group=held.group)


def parts(cached: torch.Tensor) -> list[torch.Tensor]:
    """The tensors `[B, G, …]` that `operand` reads where they lie."""
    if not isinstance(cached, Stored):
        return [cached]
    return [part for part in cached.cached.encoded if part is not None]


def _joined(part: torch.Tensor) -> torch.Tensor:
    return part.view(-1, *part.shape[2:])
