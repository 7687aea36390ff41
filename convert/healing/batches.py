"""The text that healing trains on: blocks of one length, some held out, the others in an order that a seed decides.

Which blocks a step sees follows from the seed and the step alone, so that a resumed run sees what the first one would have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attention.errors import Failure
from attention.spread import evenly_spread
from eval.text import Text, Tokens, tokenize

_SOMETHING = re.compile(r"\S")
_PIECE = 2**20  # characters that are encoded at a time: encoding takes about a hundred times their size
_HELD_OUT = 50  # one token of so many
_MOST_HELD_OUT = 32768  # tokens


def encoded(text: Text, tokenizer: Any) -> Tokens:
    """A text of any length as tokens, encoded piece by piece; pieces end with a line where lines are shorter than a piece."""
    pieces = [tokenize(Text(text.name, piece), tokenizer) for piece in _pieces(text.text)]
    ids = torch.cat([piece.ids for piece in pieces])
    size = len(text.text.encode())
    return Tokens(text.name, ids, size, len(ids) / size, pieces[0].bos)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = min(start + _PIECE, len(text))
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        if len(text) - end < _PIECE // 64 or not _SOMETHING.search(text, end):
            end = len(text)  # no short piece at the end: it may have too few tokens
        yield text[start:end]
        start = end


@dataclass(frozen=True)
class TrainingText:
    """Blocks to train on, and blocks to judge by. Blocks are named by their places in the text.

    Attributes:
        tokens: The whole text.
        blocks: `[n, context]`.
        train: The places of those to train on, int64.
        held_out: The places of the others, from all over the text; no step sees them.
    """

    tokens: Tokens
    blocks: torch.Tensor
    train: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def of(cls, tokens: Tokens, context: int, wanted: int, batch: int) -> TrainingText:
        """Cut a text into blocks.

        Args:
            tokens: The text.
            context: Tokens per block.
            wanted: Tokens of the whole training; they decide how many are held out.
            batch: Blocks per step.

        Raises:
            Failure: Less than a batch is left to train on.
        """
        blocks = tokens.blocks(context)
        held = max(1, min(len(blocks) * context, wanted, _HELD_OUT * _MOST_HELD_OUT) // (_HELD_OUT * context))
        if len(blocks) < held + batch:
            raise Failure(
                f"{tokens.name} has {len(blocks)} blocks of {context} tokens; a step takes {batch}, beside {held} held out",
                hint="give a longer text, a smaller --batch-tokens or a shorter --context",
            )
        aside = evenly_spread(held, len(blocks))
        rest = torch.ones(len(blocks), dtype=torch.bool)
        rest[aside] = False
        return cls(tokens, blocks, rest.nonzero().flatten(), torch.tensor(aside))

    def batch(self, step: int, size: int, seed: int) -> torch.Tensor:
        """`[size]`, the places of a step's blocks: of all blocks in random order, then of all in another order, and so on."""
        count = len(self.train)
        places = range(step * size, (step + 1) * size)
        orders = {turn: _order(count, seed, turn) for turn in {place // count for place in places}}
        return self.train[[orders[place // count][place % count] for place in places]]

    def seen(self, steps: int, size: int, seed: int) -> torch.Tensor:
        """The places of all blocks that some steps see, and of those to judge by, in order."""
        return torch.cat([self.held_out, *(self.batch(step, size, seed) for step in range(steps))]).unique()

    def passes(self, steps: int, size: int) -> float:
        """How often steps of `size` blocks go over the text."""
        return steps * size / len(self.train)


@functools.lru_cache(maxsize=2)
def _order(count: int, seed: int, turn: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    found: list[int] = torch.randperm(count, generator=generator).tolist()
    return found
