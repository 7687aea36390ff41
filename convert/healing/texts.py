"""The texts of a healing: those that are given are read first, and the teacher writes its own once the work begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attention.errors import Failure
from convert.healing.batches import TrainingText, held_out
from convert.healing.plan import HealPlan
from convert.planning.texts import TextSource, written_before
from eval.inputs.text import Text, Tokens, tokenize

OWN = "the teacher's own text"
_START = 4096  # characters of a text by which tokenizers are compared
_ENOUGH = 2**21  # tokens, or as many as are trained on, that are taken from a file that has more
_MOST_WRITTEN = 2**20  # tokens, which are used again if more are wanted: writing takes as long as training, or longer


@dataclass(frozen=True)
class TrainingTexts:
    """The texts of a plan, but for what the teacher writes.

    Attributes:
        plan: The healing.
        parts: Each text; None for the teacher's own.
    """

    plan: HealPlan
    parts: tuple[Tokens | None, ...]

    @classmethod
    def read(cls, plan: HealPlan) -> TrainingTexts:
        """Read the texts.

        Raises:
            Failure: A text cannot be read or is too short, or the two models' tokenizers differ.
        """
        found = cls(plan, tuple(_read(plan, text) for text in plan.options.texts))
        _ = found.known  # fails if a text is too short
        return found

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Of each text what conversion.json says."""
        return [
            {"text": part.name, "share": text.share, "hash": part.hash}
            if part and not text.own
            else {"text": OWN, "share": text.share, "hash": None}
            for text, part in self._texts
        ]

    @property
    def own(self) -> torch.Tensor | None:
        """`[n, context]`, what the teacher has written before; None if it writes now, or nothing."""
        found = (part for text, part in self._texts if part and text.own)
        return next((part.blocks(self.plan.context) for part in found), None)

    @property
    def rows_to_write(self) -> int:
        """How many blocks the teacher writes."""
        return next((_rows(self.plan, text) for text, part in self._texts if part is None), 0)

    @property
    def known(self) -> TrainingText:
        """The whole text as far as it is known, with zeros in place of what the teacher writes."""
        return self.with_own(torch.zeros(self.rows_to_write, self.plan.context, dtype=torch.int64))

    def with_own(self, written: torch.Tensor) -> TrainingText:
        """The whole text; `written [n, context]` is the teacher's own.

        Raises:
            Failure: A text is too short.
        """
        parts = [(part or _own(written), text.share) for text, part in self._texts]
        return TrainingText.of(parts, self.plan.context, self.plan.tokens, self.plan.batch)

    @property
    def _texts(self) -> list[tuple[TextSource, Tokens | None]]:
        return list(zip(self.plan.options.texts, self.parts, strict=True))


def _rows(plan: HealPlan, text: TextSource) -> int:
    """Blocks of what the teacher writes: those that its share of the training takes, and those to judge by."""
    tokens = min(_MOST_WRITTEN, _wanted(plan, text))
    train = max(plan.batch, tokens // plan.context)
    count = train + 1
    while count - held_out(count, plan.context, tokens) < train:
        count += 1
    return count


def _wanted(plan: HealPlan, text: TextSource) -> int:
    """Tokens of the training that fall on a text."""
    return int(plan.tokens * text.share / sum(one.share for one in plan.options.texts))


def _own(written: torch.Tensor) -> Tokens:
    return Tokens(OWN, written.flatten(), 0, 0.0, None)


def _read(plan: HealPlan, text: TextSource) -> Tokens | None:
    if text.own:
        if text.written is None:
            return None
        return _own(written_before(plan.teacher, text.written, None, plan.context))
    return _encoded(plan, text.read().all_over(max(_ENOUGH, _wanted(plan, text))))


def _encoded(plan: HealPlan, text: Text) -> Tokens:
    tokens = tokenize(text, plan.converted.tokenizer())
    largest, vocabulary = int(tokens.ids.max()), plan.converted.vocabulary
    if largest >= vocabulary:
        raise Failure(
            f"the tokenizer of {plan.converted.reference} makes ids up to {largest}, its model knows {vocabulary}",
            hint="the tokenizer's files are not this model's",
        )
    start = Text(text.name, text.text[:_START])
    if not torch.equal(tokenize(start, plan.teacher.tokenizer()).ids, tokenize(start, plan.converted.tokenizer()).ids):
        raise Failure(
            f"the tokenizers of {plan.converted.reference} and {plan.teacher.reference} make other tokens of the same text",
            hint="--teacher names the model that it was converted from",
        )
    return tokens
