"""Layers of transformers' `Cache` that store their numbers in a format of `attention.formats`; `encoded_forward` uses them.

transformers' own `QuantizedCache` differs in what matters here: it returns the originals during the prefill, so that an
evaluation in one pass shows no loss; it keeps the newest 128 tokens in full precision; it packs nothing below a byte without
another library; and it takes no latents.

What a query reads does not depend on how its text was cut into forward passes. Values, latents and their RoPE keys are read
as they are stored, those of the query's own token as well. Keys of heads that are grouped along time are encoded once a token
of the next group arrives; so a query reads the keys of its own group in full precision, and those of earlier groups encoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from attention.encoding import Encoded, decode, encode, rotated
from attention.errors import Refusal
from attention.formats import Format


class _Rows:
    """Cached `[B, heads, S, n]`, each token encoded by itself.

    Attributes:
        latent: Whether these are latents or their RoPE keys.
        keys: Whether these are keys of heads.
        stored: What is cached; None before the first token.
    """

    def __init__(self, form: Format, latent: bool, keys: bool) -> None:
        self.form, self.latent, self.keys = form, latent, keys
        self.stored: Encoded | None = None

    @property
    def length(self) -> int:
        """S."""
        return 0 if self.stored is None else self.stored.codes.shape[2]

    def stored_bytes(self, full: int) -> int:
        """Bytes of what is stored."""
        return 0 if self.stored is None else self.stored.nbytes

    def append(self, new: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Cache further tokens `[B, heads, T, n]`; return all as they are read."""
        form, group = self.form, self.form.latent_group if self.latent else self.form.group
        rotation = 1 if self.latent else form.rotation(new.shape[-1], self.keys)
        added = encode(new if rotation == 1 else rotated(new, rotation), form, group)
        self.stored = added if self.stored is None else _joined(self.stored, added)
        if rotation == 1:
            return decode(self.stored, form, group, new.dtype)
        return rotated(decode(self.stored, form, group, torch.float32), rotation).to(new.dtype)

    def change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change all that is stored by a function that leaves its dims in their order."""
        if self.stored is not None:
            self.stored = _changed(self.stored, how)


class _Groups:
    """Cached keys `[B, heads, S, n]`, encoded per channel in groups of consecutive tokens.

    Attributes:
        closed: `[B, heads, groups, n, tokens]` of the groups before the newest token's; None if there are none.
        opened: `[B, heads, 1 … tokens, n]`, those of the newest token's group, in full precision; None before the first token.
    """

    def __init__(self, form: Format) -> None:
        self.form = form
        self.closed: Encoded | None = None
        self.opened: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """S."""
        encoded = 0 if self.closed is None else self.closed.codes.shape[2] * self.form.tokens
        return encoded + (0 if self.opened is None else self.opened.shape[2])

    def stored_bytes(self, full: int) -> int:
        """Bytes of what is stored, if a value in full precision takes `full` of them."""
        encoded = 0 if self.closed is None else self.closed.nbytes
        return encoded + (0 if self.opened is None else self.opened.numel() * full)

    def append(self, new: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Cache further tokens `[B, heads, T, n]` of one group; return all as they are read.

        `seen` `[B, S]` is false for padding, which no scale counts; None if there is none.
        """
        tokens = self.form.tokens
        if self.opened is not None and self.opened.shape[2] == tokens:
            first = self.length - tokens
            counted = None if seen is None else seen[:, None, None, first : first + tokens].to(new.device)
            group = encode(self.opened.transpose(2, 3), self.form, tokens, counted)
            closed = _changed(group, lambda part: part.unsqueeze(2))
            self.closed = closed if self.closed is None else _joined(self.closed, closed)
            self.opened = None
        self.opened = new if self.opened is None else torch.cat([self.opened, new], 2)
        if self.opened.shape[2] > tokens:
            raise Refusal(
                f"a cache in {self.form.name} takes tokens of one group of {tokens} at a time",
                hint="call the model that attention.load(…, cache_dtype=…) returns, which cuts its input",
            )
        if self.closed is None:
            return self.opened
        read = decode(self.closed, self.form, tokens, new.dtype).transpose(3, 4).flatten(2, 3)
        return torch.cat([read, self.opened], 2)

    def change(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """As of `_Rows`; of the groups, the third dim are groups, not tokens."""
        if self.closed is not None:
            self.closed = _changed(self.closed, how)
        if self.opened is not None:
            self.opened = how(self.opened)


class EncodedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer: keys and values of heads, or a latent and its RoPE key.

    A layer with a sliding window caches all tokens, too; the mask leaves out those before the window.
    """

    def __init__(self, form: Format, latent: bool) -> None:
        super().__init__()
        self.form, self.latent = form, latent
        self.is_croppable = latent or not form.tokens
        self.seen: torch.Tensor | None = None  # [B, S], false for padding
        self.reset()

    def reset(self) -> None:
        first = _Rows(self.form, self.latent, keys=True) if self.is_croppable else _Groups(self.form)
        self.parts: tuple[_Rows | _Groups, _Rows] = (first, _Rows(self.form, self.latent, keys=False))
        self.is_initialized = False

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

        Raises:
            Refusal: They are of several groups of keys.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, second = self.parts
        return first.append(key_states, self.seen), second.append(value_states, self.seen)

    def get_seq_length(self) -> int:
        return self.parts[0].length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, as many as -`tokens_to_remove`; above 0, as older transformers has it, all but so many.

        Raises:
            Refusal: Keys of several tokens are encoded together.
        """
        if not self.is_croppable:
            raise Refusal(
                f"a cache in {self.form.name} cannot forget single tokens: the keys of {self.form.tokens} are encoded together",
                hint="use int8, fp8 or a floating dtype where tokens are taken back",
            )
        length = self.get_seq_length()
        kept = max(0, length + tokens_to_remove) if tokens_to_remove <= 0 else min(length, tokens_to_remove)
        self._change(lambda part: part[:, :, :kept])

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


def _joined(one: Encoded, other: Encoded) -> Encoded:
    """The tokens of both, or their groups."""
    return Encoded(
        *(torch.cat([old, new], 2) for old, new in zip(one, other, strict=True) if old is not None and new is not None)
    )


def _changed(stored: Encoded, how: Callable[[torch.Tensor], torch.Tensor]) -> Encoded:
    return Encoded(*(how(part) for part in stored if part is not None))
