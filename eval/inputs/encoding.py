"""Encodes a text piece by piece, with the tokens that it has as a whole: encoding takes about a hundred times the text's size.

A cut changes the tokens around it. So pieces overlap, and the second one takes over where both have had the same tokens for a
while: from there on, a tokenizer gives what it would give without the cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PIECE = 2**20  # characters that are encoded at a time
_OVERLAP = 2**13  # characters that two pieces share
_SURE = 0.75  # share of these; in the others, before a cut, tokens of both may be wrong
_ALIKE = 32  # tokens in a row that are the same in both
UNSURE = 256  # tokens before a cut that do not count


def encoded(pieces: Iterator[str], tokenizer: Any, first: int | None = None) -> tuple[torch.Tensor, int]:
    """The ids of a text, int64, and the UTF-8 bytes of what was encoded.

    Args:
        pieces: The text; no more of them are taken than needed.
        tokenizer: A tokenizer of transformers. One that does not say where its tokens begin gets as much as is needed at once.
        first: How many tokens are wanted, from the start; more may come. None for all.
    """
    import torch

    if not getattr(tokenizer, "is_fast", False):
        return _at_once(pieces, tokenizer, first)
    done, text, following = list[torch.Tensor](), next(pieces, ""), next(pieces, None)
    count, skipped, size = 0, 0, len(text.encode())  # `skipped` tokens of this text are done already
    ids, starts = _encoded(text, tokenizer)
    while following is not None and (first is None or count + len(ids) - skipped < first + UNSURE):
        size += len(following.encode())
        tail = text[-_OVERLAP:]
        after = _encoded(tail + following, tokenizer)
        sure = len(tail) - round((1 - _SURE) * _OVERLAP)
        joint = _joint(ids[skipped:], [start - (len(text) - len(tail)) for start in starts[skipped:]], *after, sure)
        if joint is None:  # begin this text again, with both pieces in it
            text += following
            ids, starts = _encoded(text, tokenizer)
        else:
            before, behind = joint
            done.append(torch.tensor(ids[skipped : skipped + before]))
            text, skipped, count = tail + following, behind, count + before
            ids, starts = after
        following = next(pieces, None)
    return torch.cat([*done, torch.tensor(ids[skipped:], dtype=torch.int64)]), size


def _at_once(pieces: Iterator[str], tokenizer: Any, first: int | None) -> tuple[torch.Tensor, int]:
    """The same, encoded as a whole; for `first` tokens twice as much as before, until it is enough."""
    import torch

    text, tried, ids = "", 0, list[int]()
    for piece in pieces:
        text += piece
        if first is not None and len(text) >= 2 * tried:
            ids, tried = _plain(text, tokenizer), len(text)
            if len(ids) >= first + UNSURE:
                break
    if tried < len(text):
        ids = _plain(text, tokenizer)
    return torch.tensor(ids, dtype=torch.int64), len(text.encode())


def _plain(text: str, tokenizer: Any) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def _encoded(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids, and where each begins in the text."""
    found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    return found["input_ids"], [start for start, _ in found["offset_mapping"]]


def _joint(ids: list[int], starts: list[int], after: list[int], after_starts: list[int], sure: int) -> tuple[int, int] | None:
    """Behind how many tokens of each the second piece takes over; None where they never agree for long enough.

    Args:
        ids: Of the first piece.
        starts: Where they begin, counted from the start of the second piece.
        after: Of the second one.
        after_starts: Where these begin.
        sure: Of what both share, the characters that are far enough from the end.
    """
    every = enumerate(zip(after_starts, after, strict=True))
    indices = {(start, token): i for i, (start, token) in every if start < sure}
    run, last = 0, -1
    for i, (start, token) in enumerate(zip(starts, ids, strict=True)):
        if (index := indices.get((start, token))) is None:
            run = 0
            continue
        run = run + 1 if index == last + 1 else 1
        if run == _ALIKE:
            return i + 1, index + 1
        last = index
    return None
