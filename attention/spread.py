"""Which of many to take so that they come from all over: blocks of a text, tokens of a block, layers of a model."""

from __future__ import annotations

_OTHERS = 8  # one block of so many judges


def evenly_spread(count: int, of: int) -> list[int]:
    """The middles of `count` equal parts of 0 … `of` − 1."""
    return [(2 * i + 1) * of // (2 * count) for i in range(count)]


def spread_blocks(tokens: int, blocks: int, context: int) -> list[int]:
    """Blocks of `context` tokens, out of `blocks`, that have at most `tokens` in all, but at least one block."""
    return evenly_spread(min(blocks, max(1, tokens // context)), blocks)


def parted(count: int) -> tuple[list[int], list[int]]:
    """Blocks to fit on, and others, an eighth and at least one, to judge by. A single block does both."""
    others = evenly_spread(max(1, count // _OTHERS), count)
    return [i for i in range(count) if i not in others or count == 1], others
