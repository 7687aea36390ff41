"""Cached numbers as an encoded cache hands them to attention: a tensor that is decoded by whoever computes with it.

`attention.kernels` knows a `Stored` and reads it as it is stored, a block of tokens at a time. Any other operation decodes all
of it first, and computes with that; the copy lives as long as the `Stored` does, which is one layer's attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from attention.encoding import Encoded, decode, encode, rotated
from attention.formats import Format, Part


class Rows(NamedTuple):
    """Cached `[B, heads, S, n]`, each token encoded by itself, in groups of consecutive values.

    Attributes:
        encoded: What is cached.
        form: Its format.
        group: Values that share a scale.
        rotation: Values that were multiplied by a Hadamard matrix together; 1 for none.
    """

    encoded: Encoded
    form: Format
    group: int
    rotation: int = 1

    @property
    def shape(self) -> torch.Size:
        """Of what is decoded."""
        codes = self.encoded.codes
        size = self.group if self.form.classes else codes.shape[3] * codes.element_size() * 8 // self.form.bits
        return torch.Size((*codes.shape[:3], size))

    def block(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Tokens `start` … `end` - 1, decoded."""
        part = Encoded(*(held[:, :, start:end] for held in self.encoded if held is not None))
        if self.rotation == 1:
            return decode(part, self.form, self.group, dtype)
        return rotated(decode(part, self.form, self.group, torch.float32), self.rotation).to(dtype)


class Stored(torch.Tensor):
    """Cached `[B, heads, S, n]` as `cached` holds it, which passes for the tensor that `whole` returns.

    Attributes:
        cached: What is stored.
    """

    cached: Rows
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, cached: Rows, dtype: torch.dtype) -> Stored:
        device = cached.encoded.codes.device
        made: Stored = torch.Tensor._make_wrapper_subclass(cls, cached.shape, dtype=dtype, device=device)
        made.cached, made._whole = cached, None
        return made

    def whole(self) -> torch.Tensor:
        """All of it, decoded."""
        if self._whole is None:
            self._whole = self.cached.block(0, self.shape[2], self.dtype).contiguous()  # as its strides say
        return self._whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stored({list(self.shape)}, {self.cached.form.name})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Stored, Stored.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def as_read(cached: Rows, new: torch.Tensor) -> torch.Tensor:
    """What is cached, as attention reads it that has just cached `new [B, heads, T, n]`: a tensor of the same dtype.

    Attention with one query reads encoded values; several queries and compiled code get them decoded.
    """
    if cached.encoded.codes.dtype == new.dtype:
        return cached.encoded.codes
    if new.shape[2] > 1 or torch.compiler.is_compiling():
        return cached.block(0, cached.shape[2], new.dtype)
    return Stored(cached, new.dtype)


def encoded_rows(states: torch.Tensor, form: Format, part: Part) -> Rows:
    """A part of a cache `[B, heads, T, n]`, each token encoded by itself."""
    form = form.of(part)
    group, rotation = form.grouping(part, states.shape[-1])
    return Rows(encode(states if rotation == 1 else rotated(states, rotation), form, group), form, group, rotation)
