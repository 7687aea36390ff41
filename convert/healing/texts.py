"""The texts of a healing, and their blocks: some are held out, the others come in an order that a seed decides.

Texts that are given are read first, and the teacher writes its own once the work begins. Which blocks a step sees follows from
the seed and the step alone, so that a resumed run sees what the first one would have.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attention.errors import Failure
from attention.spread import evenly_spread
from convert.calibration.own_text import own_text
from convert.healing.plan import HealPlan
from convert.output.companions import write_own_text
from convert.output.destination import CHECKPOINT, partial_path
from convert.output.writing import Work
from convert.planning.retrieval import retrieving
from convert.planning.texts import MOST_WRITTEN, TextSource, own_tokens, written_before
from eval.inputs.loading import tokens_of
from eval.inputs.text import HEALED_ON, OWN_TEXT, Text, Tokens, joined, tokenize
from eval.machine.device import compute_device
from eval.terminal.progress import Progress

_log = logging.getLogger("kvfold")
OWN = "the teacher's own text"
_START = 4096  # characters of a text by which tokenizers are compared
_SEED = 2  # added to the seed, so that the teacher writes other text than a conversion and its check have seen
_HELD_OUT = 50  # one token of so many
_LEAST_HELD_OUT, _MOST_HELD_OUT = 2048, 32768  # tokens
_SPARED = 8  # one block of so many is held out at most, where that is less


@dataclass(frozen=True)
class TrainingText:
    """Blocks to train on, and blocks to judge by. Blocks are named by their indices in the text.

    Attributes:
        tokens: The whole text: whole blocks of several ones, one after the other.
        blocks: `[n, context]`, of the text.
        parts: Of each text the blocks to train on, int64.
        held_out: The indices of the others, from all over each text; no step sees them.
        positions: `[n, context]`, of the tokens of each block.
    """

    tokens: Tokens
    blocks: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    held_out: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, plan: HealPlan, texts: Sequence[Tokens]) -> TrainingText:
        """Cut texts into blocks, of which every other one retrieves (`convert.planning.retrieval`).

        Args:
            plan: Of the healing; the tokens of the whole training decide how many are held out.
            texts: The texts.

        Raises:
            Failure: A text has no block to train on, or all of them less than a batch.
        """
        parts, aside, start, context = list[torch.Tensor](), list[torch.Tensor](), 0, plan.context
        for tokens in texts:
            count = len(tokens.ids) // context
            spared = min(count, held_out(count, context, plan.tokens // len(texts)))
            trains = torch.ones(count, dtype=torch.bool)
            trains[evenly_spread(spared, count)] = False
            parts.append(start + trains.nonzero().flatten())
            aside.append(start + (~trains).nonzero().flatten())
            start += count
            if not len(parts[-1]):
                raise Failure(
                    f"{tokens.name} has {count} blocks of {context} tokens, too few to hold one out and train on others",
                    hint="give a longer text, or a shorter --context",
                )
        if (left := sum(map(len, parts))) < plan.batch:
            names = " and ".join(tokens.name for tokens in texts)
            raise Failure(
                f"{names} has {start} blocks of {context} tokens; a step takes {plan.batch}, beside {start - left} held out",
                hint="give a longer text, a smaller --batch-tokens or a shorter --context",
            )
        text = joined(texts if len(texts) == 1 else [replace(one, ids=one.blocks(context).flatten()) for one in texts])
        blocks = text.blocks(context)
        positions, others = torch.arange(context).repeat(len(blocks), 1), torch.cat([part[1::2] for part in (*parts, *aside)])
        blocks = blocks.clone()
        blocks[others], positions[others] = retrieving(blocks[others], plan.retrieval_limit)
        return cls(text, blocks, tuple(parts), torch.cat(aside), positions)

    def order(self, count: int, seed: int) -> torch.Tensor:
        """`[count]`, the indices of the blocks that steps see, one after the other.

        Texts take turns. Each gives all of its blocks in random order, then all in another order, and so on.
        """
        each, orders = -(-count // len(self.parts)), list[torch.Tensor]()
        for part in self.parts:
            turns = (torch.Generator().manual_seed(seed * 1_000_003 + turn) for turn in range(-(-each // len(part))))
            orders.append(torch.cat([part[torch.randperm(len(part), generator=turn)] for turn in turns])[:each])
        return torch.stack(orders, 1).flatten()[:count]

    def passes(self, steps: int, size: int) -> float:
        """How often steps of `size` blocks go over the text, or over that of several which they see most often."""
        return steps * size / len(self.parts) / min(map(len, self.parts))


def held_out(blocks: int, context: int, wanted: int) -> int:
    """How many blocks of a text are held out, where so many tokens of it are trained on.

    Enough to tell a gain from noise, however few are trained on, if the text has them.
    """
    found = min(blocks * context, wanted, _HELD_OUT * _MOST_HELD_OUT) // (_HELD_OUT * context)
    return max(1, found, min(-(-_LEAST_HELD_OUT // context), blocks // _SPARED))


@dataclass(frozen=True)
class TrainingTexts:
    """The texts of a plan, but for what the teacher writes.

    Attributes:
        plan: The healing.
        parts: The tokens of each text of the plan; none for those that the teacher has still to write.
    """

    plan: HealPlan
    parts: tuple[Tokens, ...]

    @classmethod
    def read(cls, plan: HealPlan) -> TrainingTexts:
        """Read the texts.

        Raises:
            Failure: A text cannot be read or is too short, or the two models' tokenizers differ.
        """
        texts = cls(plan, tuple(_read(plan, text) for text in plan.options.texts))
        texts.whole()  # fails if a text is too short
        return texts

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Of each text what conversion.json says."""
        texts = zip(self.plan.options.texts, self.parts, strict=True)
        return [{"text": part.name, "hash": None if text.own else part.hash} for text, part in texts]

    @property
    def rows_to_write(self) -> int:
        """How many blocks the teacher writes: those that its part of the training takes, and those to judge by."""
        if all(len(part.ids) for part in self.parts):
            return 0
        plan, tokens = self.plan, min(MOST_WRITTEN, self.plan.tokens // len(self.parts))
        train = max(plan.batch, tokens // plan.context)
        return next(count for count in itertools.count(train + 1) if count - held_out(count, plan.context, tokens) >= train)

    def whole(self, own: torch.Tensor | None = None) -> TrainingText:
        """The whole text; where what the teacher writes, `own [rows, context]`, is not known, zeros are in its place."""
        if own is None:
            own = torch.zeros(self.rows_to_write, self.plan.context, dtype=torch.int64)
        written = own_tokens(OWN, own)
        return TrainingText.of(self.plan, [part if len(part.ids) else written for part in self.parts])

    def written(self, work: Work, progress: Progress) -> TrainingText:
        """The whole text, with what the teacher writes or has written before, which is kept beside the weights."""
        context, own = self.plan.context, None
        for given, part in zip(self.plan.options.texts, self.parts, strict=True):
            if given.own and len(part.ids):
                write_own_text(work.path, part.blocks(context))
        if rows := self.rows_to_write:
            device, hint = compute_device(self.plan.device), "give another --text FILE"
            own = own_text(self.plan.teacher, rows, context, self.plan.seed + _SEED, device, work.steps, progress, hint)
            write_own_text(work.path, own)
            work.kept = True  # it may have taken hours
        text = self.whole(own)
        if (tokens := len(text.held_out) * context) < _LEAST_HELD_OUT:
            _log.warning(
                "only %d held-out tokens judge the healing, and small gains will be noise: %d are held out of a text of %d",
                tokens, _LEAST_HELD_OUT, _SPARED * _LEAST_HELD_OUT,
            )  # fmt: skip
        return text

    def written_by_first(self) -> TrainingText:
        """The whole text in another process, once the first one has written it."""
        file, rows = partial_path(self.plan.output.path) / CHECKPOINT / OWN_TEXT, self.rows_to_write
        return self.whole(written_before(self.plan.teacher, file, rows, self.plan.context) if rows else None)


def _read(plan: HealPlan, text: TextSource) -> Tokens:
    if text.own:
        return own_tokens(OWN, written_before(plan.teacher, text.written, None, plan.context) if text.written else None)
    read, enough = text.read(), max(HEALED_ON, plan.tokens // len(plan.options.texts))
    tokens, start = tokens_of(plan.converted, read, enough), Text(read.name, read.text[:_START])
    if not torch.equal(tokenize(start, plan.teacher.tokenizer()).ids, tokenize(start, plan.converted.tokenizer()).ids):
        raise Failure(
            f"the tokenizers of {plan.converted.reference} and {plan.teacher.reference} make other tokens of the same text",
            hint="--teacher names the model that it was converted from",
        )
    return tokens
