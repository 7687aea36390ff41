"""The texts that healing trains on: blocks of one length, some held out, the others in an order that a seed decides.

Which blocks a step sees follows from the seed and the step alone, so that a resumed run sees what the first one would have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attention.errors import Failure
from attention.spread import evenly_spread
from eval.inputs.text import Tokens, joined

_HELD_OUT = 50  # one token of so many
LEAST_HELD_OUT, _MOST_HELD_OUT = 2048, 32768  # tokens
SPARED = 8  # one block of so many is held out at most, where that is less


@dataclass(frozen=True)
class Part:
    """The part of one of several texts that trains.

    Attributes:
        indices: Of its blocks among all, int64.
        share: Of the blocks that are trained on, relative to the shares of the other texts.
    """

    indices: torch.Tensor
    share: float


@dataclass(frozen=True)
class TrainingText:
    """Blocks to train on, and blocks to judge by. Blocks are named by their indices in the text.

    Attributes:
        tokens: The whole text: whole blocks of several ones, one after the other.
        blocks: `[n, context]`, of the text, and behind them those of another one to judge by.
        parts: Of each text the blocks to train on.
        held_out: The indices of the others, from all over each text; no step sees them.
    """

    tokens: Tokens
    blocks: torch.Tensor
    parts: tuple[Part, ...]
    held_out: torch.Tensor

    @classmethod
    def of(
        cls, texts: Sequence[tuple[Tokens, float]], context: int, wanted: int, batch: int, judged: Tokens | None = None
    ) -> TrainingText:
        """Cut texts into blocks.

        Args:
            texts: The texts, each with its share of the training.
            context: Tokens per block.
            wanted: Tokens of the whole training; they decide how many are held out.
            batch: Blocks per step.
            judged: A text to judge by, so that of the others no block is held out.

        Raises:
            Failure: A text has no block to train on, or all of them less than a batch.
        """
        parts, aside, start, whole = list[Part](), list[torch.Tensor](), 0, sum(share for _, share in texts)
        for tokens, share in texts:
            count = len(tokens.ids) // context
            spared = min(count, held_out(count, context, int(wanted * share / whole))) if judged is None else 0
            out = evenly_spread(spared, count)
            rest = torch.ones(count, dtype=torch.bool)
            rest[out] = False
            parts.append(Part(start + rest.nonzero().flatten(), share))
            aside.append(start + torch.tensor(out, dtype=torch.int64))
            start += count
            if not len(parts[-1].indices):
                raise Failure(
                    f"{tokens.name} has {count} blocks of {context} tokens, too few to hold one out and train on others",
                    hint="give a longer text, or a shorter --context",
                )
        if (left := sum(len(part.indices) for part in parts)) < batch:
            names = " and ".join(tokens.name for tokens, _ in texts)
            raise Failure(
                f"{names} has {start} blocks of {context} tokens; a step takes {batch}, beside {start - left} held out",
                hint="give a longer text, a smaller --batch-tokens or a shorter --context",
            )
        alone = [tokens for tokens, _ in texts]
        text = joined(alone if len(alone) == 1 else [replace(one, ids=one.blocks(context).flatten()) for one in alone])
        blocks = text.blocks(context)
        if judged is not None:
            aside = [start + torch.arange(len(judged.ids) // context)]
            blocks = torch.cat((blocks, judged.blocks(context)))
        return cls(text, blocks, tuple(parts), torch.cat(aside))

    def order(self, count: int, seed: int) -> torch.Tensor:
        """`[count]`, the indices of the blocks that steps see, one after the other.

        Texts take turns by their shares. Each gives all of its blocks in random order, then all in another order, and so on.
        """
        found, shares = torch.empty(count, dtype=torch.int64), [part.share for part in self.parts]
        for index in range(count):
            text, number = turn(index, shares)
            blocks = self.parts[text].indices
            again, among = divmod(number, len(blocks))
            found[index] = blocks[_order(len(blocks), seed, again)[among]]
        return found

    def passes(self, steps: int, size: int) -> float:
        """How often steps of `size` blocks go over the text, or over that of several which they see most often."""
        whole = sum(part.share for part in self.parts)
        return max(steps * size * part.share / whole / len(part.indices) for part in self.parts)


def held_out(blocks: int, context: int, wanted: int) -> int:
    """How many blocks of a text are held out, where so many tokens of it are trained on.

    Enough to tell a gain from noise, however few are trained on, if the text has them.
    """
    found = min(blocks * context, wanted, _HELD_OUT * _MOST_HELD_OUT) // (_HELD_OUT * context)
    return max(1, found, min(-(-LEAST_HELD_OUT // context), blocks // SPARED))


def turn(index: int, shares: Sequence[float]) -> tuple[int, int]:
    """Whose turn it is at an index of a sequence in which each has its share, and how many turns it had before."""
    for i, share in enumerate(shares[:-1]):
        part = share / sum(shares[i:])
        before = math.ceil(index * part)
        if math.ceil((index + 1) * part) > before:
            return i, before
        index -= before
    return len(shares) - 1, index


@functools.lru_cache(maxsize=16)
def _order(count: int, seed: int, turn: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + turn)
    found: list[int] = torch.randperm(count, generator=generator).tolist()
    return found
