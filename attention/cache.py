"""Layers of transformers' `Cache` that store their numbers in a format of `attention.formats`; `encoded_forward` uses them.

transformers' own `QuantizedCache` differs in what matters here: it returns the originals during the prefill, so that an
evaluation in one pass shows no loss; it keeps the newest 128 tokens in full precision; it packs nothing below a byte without
another library; and it takes no latents.

What a query reads does not depend on how its text was cut into forward passes. Values, latents and their RoPE keys are read
as they are stored, those of the query's own token as well. Keys of heads that are grouped along time are encoded once a token
of the next group arrives; so a query reads the keys of its own group in full precision, and those of earlier groups encoded.
Where a pass has tokens of several groups, its keys are there in both ways, and a mask says which of them a query reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from attention.encoding import Encoded, encode
from attention.errors import Refusal
from attention.formats import Format, Part, parts_of
from attention.stored import Groups, Rows, Stored, as_read, encoded_rows

_SPARE = 256  # tokens that there is room for whenever a cache grows: a copy of all that seldom costs nothing


class _Growing:
    """What is encoded of tokens, or of groups of them (dim 2), with room for more: a step writes what is new, no more.

    The oldest can be forgotten, which moves nothing.

    Attributes:
        length: How many there are.
    """

    def __init__(self, spare: int) -> None:
        self.length, self._spare, self._first = 0, spare, 0
        self._held: list[torch.Tensor] = []

    @property
    def stored(self) -> Encoded | None:
        """Without the room; None before the first."""
        return Encoded(*map(self._within, self._held)) if self._held else None

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return 0 if self.stored is None else self.stored.nbytes

    def append(self, new: Encoded) -> Encoded:
        """Add tokens, or groups; return all."""
        parts = [part for part in new if part is not None]
        before, self.length = self.length, self.length + parts[0].shape[2]
        if not self._has_room(self._first + self.length):
            room = (self.length // self._spare + 1) * self._spare
            grown = [part.new_empty((*part.shape[:2], room, *part.shape[3:])) for part in parts]
            for held, more in zip(self._held, grown, strict=bool(self._held)):
                more[:, :, :before] = held[:, :, self._first : self._first + before]
            self._held, self._first = grown, 0
        for held, part in zip(self._held, parts, strict=True):
            self._within(held)[:, :, before:] = part
        return Encoded(*map(self._within, self._held))

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
        """Forget the oldest."""
        self._first, self.length = self._first + count, self.length - count
        if count > self._spare:  # a long text has taken far more room than is needed
            self.change(torch.clone)


class _HeldRows:
    """Cached `[B, heads, S, n]`, each token encoded by itself."""

    def __init__(self, form: Format, part: Part) -> None:
        self.form, self._part = form, part
        self._encoded = _Growing(_SPARE)

    @property
    def length(self) -> int:
        """S."""
        return self._encoded.length

    def stored_bytes(self, full: int) -> int:
        """Bytes of what is stored."""
        return self._encoded.nbytes

    def append(self, new: torch.Tensor, seen: torch.Tensor | None) -> Rows:
        """Cache further tokens `[B, heads, T, n]`; return all."""
        added = encoded_rows(new, self.form, self._part)
        return added._replace(encoded=self._encoded.append(added.encoded))

    def forget(self, count: int) -> None:
        """Forget the oldest tokens."""
        self._encoded.forget(count)

    def change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change all that is stored by a function that leaves its dims in their order."""
        self._encoded.change(how)


class _HeldGroups:
    """Cached keys `[B, heads, S, n]`, encoded per channel in groups of consecutive tokens: see `Groups`."""

    def __init__(self, form: Format) -> None:
        self.form = form
        self._closed = _Growing(_SPARE // form.tokens)
        self._opened: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """S."""
        return self._closed.length * self.form.tokens + (0 if self._opened is None else self._opened.shape[2])

    def stored_bytes(self, full: int) -> int:
        """Bytes of what is stored, if a value in full precision takes `full` of them."""
        return self._closed.nbytes + (0 if self._opened is None else self._opened.numel() * full)

    def append(self, new: torch.Tensor, seen: torch.Tensor | None) -> Groups:
        """Cache further tokens `[B, heads, T, n]`; return all, those from the first new token's group on in full precision.

        `seen` `[B, S]` is false for padding, which no scale counts; None if there is none.
        """
        tokens, closed = self.form.tokens, self._closed.length
        opened = new if self._opened is None else torch.cat([self._opened, new], 2)
        first = (opened.shape[2] - new.shape[2]) // tokens * tokens
        if behind := (opened.shape[2] - 1) // tokens:  # groups before that of the newest token
            groups = opened[:, :, : behind * tokens].unflatten(2, (-1, tokens)).transpose(3, 4)
            if seen is not None:
                seen = seen[:, closed * tokens : (closed + behind) * tokens].to(new.device).view(-1, 1, behind, 1, tokens)
            self._closed.append(encode(groups, self.form, tokens, seen))
        self._opened = opened[:, :, behind * tokens :].clone() if behind else opened  # a view would keep all of them in memory
        return Groups(self._closed.stored, opened[:, :, first:], self.form)

    def forget(self, count: int) -> None:
        """Forget the oldest tokens, which are whole groups."""
        self._closed.forget(count // self.form.tokens)

    def require_one_group(self, count: int) -> None:
        """Refuse so many further tokens if they are of several groups."""
        if self.length % self.form.tokens + count > self.form.tokens:
            raise Refusal(
                f"a cache in {self.form.name} takes tokens of one group of {self.form.tokens} at a time",
                hint="call the model that attention.load(…, cache_dtype=…) returns, which takes any number",
            )

    def change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """As of `_HeldRows`; of the groups, the third dim are groups, not tokens."""
        self._closed.change(how)
        if self._opened is not None:
            self._opened = how(self._opened)


class EncodedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer: keys and values of heads, or a latent and its RoPE key.

    With a window of W, it keeps the newest W - 1 tokens, as transformers' own layer does. Keys that are encoded along time are
    forgotten a group at a time, and the mask leaves out those before the window.
    """

    def __init__(self, form: Format, latent: bool, window: int | None = None) -> None:
        super().__init__()
        self.form, self.latent, self.sliding_window = form, latent, window
        self.is_sliding, self.record_past = window is not None, False
        self.is_croppable = not form.along_time(parts_of(latent)[0])
        self.seen: torch.Tensor | None = None  # [B, S], false for padding
        self.masked = False  # whether a mask says what queries of several groups of keys read
        self.reset()

    def reset(self) -> None:
        first, second = parts_of(self.latent)
        keys = _HeldRows(self.form, first) if self.is_croppable else _HeldGroups(self.form)
        self.parts: tuple[_HeldRows | _HeldGroups, _HeldRows] = keys, _HeldRows(self.form, second)
        self.is_initialized, self.forgotten = False, 0

    def stored_bytes(self, full: int) -> int:
        """Bytes that it holds, if a value that is not encoded yet takes `full` of them."""
        return sum(part.stored_bytes(full) for part in self.parts)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache the new tokens of `[B, heads, T, n]` each; return all that is cached, as queries read it.

        New tokens of several groups of keys come twice, if a mask says which of them a query reads: all up to the newest
        token's group as they are stored, and then those from the first new token's group on with keys in full precision.

        Raises:
            Refusal: They are of several groups of keys, and nothing says that there is a mask.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, second = self.parts
        if isinstance(first, _HeldGroups) and not self.masked:
            first.require_one_group(key_states.shape[2])
        seen = None if self.seen is None else self.seen[:, self.forgotten :]
        keys, values = first.append(key_states, seen), second.append(value_states, seen)
        if not self.record_past:
            self._forget()
        if isinstance(keys, Groups) and keys.shape[2] > values.shape[2]:  # some are there in both ways
            count, whole = keys.opened.shape[2], values.block(0, values.shape[2], value_states.dtype)
            twice = whole[:, :, : keys.shape[2] - count], whole[:, :, -count:]
            return keys.block(0, keys.shape[2], key_states.dtype), torch.cat(twice, 2)
        read = as_read(keys, key_states), as_read(values, value_states)
        if isinstance(read[0], Stored) == isinstance(read[1], Stored):
            return read
        # Of two dtypes (autocast), one may be stored as it is read: kernels take both encoded, or none.
        decoded = [part.whole() if isinstance(part, Stored) else part for part in read]
        return decoded[0], decoded[1]

    def _forget(self) -> None:
        """Forget tokens that are in no later token's window."""
        together = 1 if self.is_croppable else self.form.tokens
        kept = self.parts[0].length if self.sliding_window is None else self.sliding_window - 1
        count = max(0, self.parts[0].length - max(kept, together > 1)) // together * together  # one group is open
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
            Refusal: Keys of several tokens are encoded together, or the window of what is left has been forgotten.
        """
        if not self.is_croppable:
            raise Refusal(
                f"a cache in {self.form.name} cannot forget single tokens: the keys of {self.form.tokens} are encoded together",
                hint="use int8, fp8 or a floating dtype where tokens are taken back",
            )
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
