"""Which of many to take so that they come from all over: blocks of a text, tokens of a block, layers of a model."""


def evenly_spread(count: int, of: int) -> list[int]:
    """The middles of `count` equal parts of 0 … `of` − 1."""
    return [(2 * i + 1) * of // (2 * count) for i in range(count)]


def spread_blocks(tokens: int, blocks: int, context: int) -> list[int]:
    """Blocks of `context` tokens, out of `blocks`, that have at most `tokens` in all, but at least one block."""
    return evenly_spread(min(blocks, max(1, tokens // context)), blocks)
