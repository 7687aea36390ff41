"""Layers of transformers' `Cache` that store their numbers in a format of `attention.formats`; `encoded_forward` uses them.

Each token is encoded by itself when it is written, and decoded when it is read. So a query, also one of the same forward pass,
reads what a later one reads, however the text was cut into passes.

transformers' own `QuantizedCache` differs in what matters here: it returns the originals during the prefill, so that an
evaluation in one pass shows no loss; it keeps the newest 128 tokens in full precision; it packs nothing below a byte without
another library; and it takes no latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from transformers.cache_utils import DynamicLayer

from attention.encoding import Encoded, decode, encode, rotated
from attention.errors import Refusal
from attention.formats import Format, Part, parts_of

_SPARE = 256  # tokens that there is room for whenever a cache grows: a copy of all that seldom costs nothing


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
    rotation: int

    @property
    def shape(self) -> torch.Size:
        """Of what is decoded."""
        codes, as_given = self.encoded.codes, self.form.classes or self.form.rule
        size = self.group if as_given else codes.shape[3] * codes.element_size() * 8 // self.form.bits
        return torch.Size((*codes.shape[:3], size))

    def block(self, start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Tokens `start` … `end` - 1, decoded."""
        part = Encoded(*(held[:, :, start:end] for held in self.encoded if held is not None))
        if self.rotation == 1:
            return decode(part, self.form, self.group, dtype)
        return rotated(decode(part, self.form, self.group, torch.float32), self.rotation).to(dtype)

    def as_read(self, new: torch.Tensor) -> torch.Tensor:
        """It as attention reads it that has just cached `new [B, heads, T, n]`: a tensor of the same dtype.

        Attention with one query reads encoded values; several queries and compiled code get them decoded.
        """
        if self.encoded.codes.dtype == new.dtype:
            return self.encoded.codes
        if new.shape[2] > 1 or torch.compiler.is_compiling():
            return self.block(0, self.shape[2], new.dtype)
        return Stored(self, new.dtype)


class Stored(torch.Tensor):
    """Cached `[B, heads, S, n]` as `cached` holds it, which passes for the tensor that `whole` returns.

    `attention.kernels` reads it as it is stored, a block of tokens at a time. Any other operation decodes all of it first, and
    computes with that; the copy lives as long as this does, which is one layer's attention.

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


class _HeldRows:
    """Cached `[B, heads, S, n]`, encoded, with room for more: a step writes what is new, no more.

    The oldest can be forgotten, which moves nothing. Tokens that are to stay exact would be held here, beside the encoded ones,
    and `Rows` would read both.

    Attributes:
        length: S.
    """

    def __init__(self, form: Format, part: Part) -> None:
        self.length, self._form, self._part, self._first = 0, form.of(part), part, 0
        self._held: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored, without the room."""
        return sum(self._within(held).nbytes for held in self._held)

    def append(self, new: torch.Tensor) -> Rows:
        """Cache further tokens `[B, heads, T, n]`; return all."""
        group, rotation = self._form.grouping(self._part, new.shape[3])
        added = encode(new if rotation == 1 else rotated(new, rotation), self._form, group)
        parts = [part for part in added if part is not None]
        before, self.length = self.length, self.length + new.shape[2]
        if not self._has_room(self._first + self.length):
            room = (self.length // _SPARE + 1) * _SPARE
            grown = [part.new_empty((*part.shape[:2], room, *part.shape[3:])) for part in parts]
            for held, more in zip(self._held, grown, strict=bool(self._held)):
                more[:, :, :before] = held[:, :, self._first : self._first + before]
            self._held, self._first = grown, 0
        for held, part in zip(self._held, parts, strict=True):
            self._within(held)[:, :, before:] = part
        return Rows(Encoded(*map(self._within, self._held)), self._form, group, rotation)

    def _within(self, held: torch.Tensor) -> torch.Tensor:
        return held[:, :, self._first : self._first + self.length]

    def _has_room(self, end: int) -> bool:
        """Whether what is new can be written in place: not into tensors that autograd may have saved, or of inference alone."""
        if not self._held or end > self._held[0].shape[2] or torch.is_grad_enabled():
            return False
        return self._held[0].is_inference() <= torch.is_inference_mode_enabled()

    def change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change all that is stored by a function that leaves its dims in their order."""
        self._held, self._first = [how(self._within(held)) for held in self._held], 0
        self.length = self._held[0].shape[2] if self._held else 0

    def forget(self, count: int) -> None:
        """Forget the oldest tokens."""
        self._first, self.length = self._first + count, self.length - count
        if count > _SPARE:  # a long text has taken far more room than is needed
            self.change(torch.clone)


class EncodedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer: keys and values of heads, or a latent and its RoPE key.

    With a window of W, it keeps the newest W - 1 tokens, as transformers' does. `decoded`: it returns plain tensors.
    """

    def __init__(self, form: Format, latent: bool, window: int | None = None, decoded: bool = False) -> None:
        super().__init__()
        self.form, self.latent, self.sliding_window, self.decoded = form, latent, window, decoded
        self.is_sliding, self.record_past = window is not None, False
        self.reset()

    def reset(self) -> None:
        self.parts = tuple(_HeldRows(self.form, part) for part in parts_of(self.latent))
        self.is_initialized, self.forgotten = False, 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return sum(part.nbytes for part in self.parts)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache the new tokens of `[B, heads, T, n]` each; return all that is cached, as queries read it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        given = key_states, value_states
        read = [part.append(new).as_read(new) for part, new in zip(self.parts, given, strict=True)]
        if not self.record_past:
            self._forget()
        # Of two dtypes (autocast), one may be stored as it is read: kernels take both encoded, or none.
        if self.decoded or not all(isinstance(part, Stored) for part in read):
            read = [part.whole() if isinstance(part, Stored) else part for part in read]
        return read[0], read[1]

    def _forget(self) -> None:
        """Forget tokens that are in no later token's window."""
        if self.sliding_window is None:
            return
        count = max(0, self.parts[0].length - (self.sliding_window - 1))
        for part in self.parts if count else ():
            part.forget(count)
        self.forgotten += count

    def get_seq_length(self) -> int:
        return self.forgotten + self.parts[0].length

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.parts[0].length + query_length, self.forgotten

    def activate_past_recording(self) -> None:
        """Forget nothing before the next `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, as many as -`tokens_to_remove`; above 0, as older transformers has it, all but so many.

        Raises:
            Refusal: The window of what is left has been forgotten.
        """
        length = self.get_seq_length()
        kept = max(0, length + tokens_to_remove) if tokens_to_remove <= 0 else min(length, tokens_to_remove)
        held = kept - self.forgotten
        if self.sliding_window is not None and held < min(kept, self.sliding_window - 1):
            raise Refusal(
                f"a layer that sees {self.sliding_window} tokens has forgotten those before token {self.forgotten}, which the "
                f"first {kept} need",
                hint="call activate_past_recording() of the cache before the tokens that are taken back are read",
            )
        self._change(lambda part: part[:, :, :held])
        self._forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._change(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda part: part.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change(lambda part: part[indices])

    def offload(self) -> None:
        self._change(lambda part: part.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._change(lambda part: part.to(self.device, non_blocking=True))

    def _change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for part in self.parts:
            part.change(how)
