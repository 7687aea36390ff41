"""Encodes a text piece by piece, with the tokens that it has as a whole: encoding takes about a hundred times the text's size.

A cut changes the tokens around it. So pieces overlap, and the second one takes over where both have had the same tokens for a
while: from there on, a tokenizer gives what it would give without the cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PIECE = 2**20  # characters that are encoded at a time
_OVERLAP = 2**13  # characters that two pieces share
_SURE = 0.75  # share of these; in the others, before a cut, tokens of both may be wrong
_ALIKE = 32  # tokens in a row that are the same in both
_UNSURE = 256  # tokens before a cut that do not count
CHARACTERS = 8  # per token, as a first guess


def encoded(text: str, tokenizer: Any, first: int | None = None) -> tuple[torch.Tensor, int]:
    """The ids of a text, int64, and the UTF-8 bytes of what was encoded.

    Args:
        text: The text.
        tokenizer: A tokenizer of transformers. One that does not say where its tokens begin gets all at once; for some tokens,
            twice as much as before until it is enough.
        first: How many tokens are wanted, from the start; more may come. None for all.
    """
    import torch

    fast, needed = getattr(tokenizer, "is_fast", False), None if first is None else first + _UNSURE
    start, end = 0, PIECE if fast else len(text)
    if needed is not None:
        end = min(PIECE, CHARACTERS * needed)
    done, count, skipped = list[torch.Tensor](), 0, 0  # `skipped` tokens of this piece are done already
    ids, places = _encoded(text[start:end], tokenizer, fast)
    while end < len(text) and (needed is None or count + len(ids) - skipped < needed):
        if not fast:
            end *= 2
            ids, places = _encoded(text[:end], tokenizer, fast)
            continue
        next_start, next_end = max(start, end - _OVERLAP), end + PIECE
        after, after_places = _encoded(text[next_start:next_end], tokenizer, fast)
        sure = end - next_start - round((1 - _SURE) * _OVERLAP)
        here = [start + place - next_start for place in places[skipped:]]
        joint = _joint(ids[skipped:], here, after, after_places, sure)
        if joint is None:  # begin this piece again, with both in it
            ids, places = _encoded(text[start:next_end], tokenizer, fast)
        else:
            before, behind = joint
            done.append(torch.tensor(ids[skipped : skipped + before]))
            start, ids, places, skipped, count = next_start, after, after_places, behind, count + before
        end = next_end
    return torch.cat([*done, torch.tensor(ids[skipped:], dtype=torch.int64)]), len(text[:end].encode())


def _encoded(text: str, tokenizer: Any, fast: bool) -> tuple[list[int], list[int]]:
    """The ids, and where each begins in the text if the tokenizer says so."""
    offsets = {"return_offsets_mapping": True} if fast else {}
    found = tokenizer(text, add_special_tokens=False, verbose=False, **offsets)
    return found["input_ids"], [start for start, _ in found.get("offset_mapping", ())]


def _joint(ids: list[int], starts: list[int], after: list[int], after_starts: list[int], sure: int) -> tuple[int, int] | None:
    """Behind how many tokens of each the second piece takes over; None where they never agree for long enough.

    Args:
        ids: Of the first piece.
        starts: Where they begin, counted from the start of the second piece.
        after: Of the second one.
        after_starts: Where these begin.
        sure: Of what both share, the characters that are far enough from the end.
    """
    places = list(zip(starts, ids, strict=True))
    others = [place for place in zip(after_starts, after, strict=True) if place[0] < sure]
    indices = {place: index for index, place in enumerate(others)}
    for i, place in enumerate(places):
        if (j := indices.get(place)) is None:
            continue
        run = others[j : j + _ALIKE]
        if len(run) == _ALIKE and run == places[i : i + _ALIKE]:
            return i + _ALIKE, j + _ALIKE
    return None
