"""The text that a plan calibrates on, and the steps that use it."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attention.errors import Failure, Refusal
from convert import methods
from convert.methods.blocks import Blocks
from convert.methods.text import Method, TextUse
from convert.planning.retrieval import retrieving
from convert.planning.texts import DEFAULT, MOST_WRITTEN, OWN, Texts, as_options, own_tokens, shared_out, written_before
from eval.inputs.loading import tokens_of
from eval.inputs.text import Tokens, joined, reach

if TYPE_CHECKING:
    from eval.inputs.source import Source

_log = logging.getLogger("kvfold")
_TOKENS, _CONTEXT = 32768, 2048
_OWN_TOKENS, _OWN_CONTEXT = 65536, 512  # where a model writes a part: it drifts, so beginnings are worth more than long texts
_TOKENS_PER_CHANNEL = 8
_OTHERS = 2048  # tokens of each text, at least a block, on which the result is checked
_HEALED_CONTEXT = 512  # at most: many steps are worth more than long blocks
LEAST_BLOCKS = 8  # of a text that a healing needs; a step takes at most an eighth of its blocks
_DECIDED_ON = 8192  # tokens: with four times as many, only choices between near ties differed


@dataclass(frozen=True)
class CalibrationOptions:
    """The user's calibration options. Numbers left as None depend on the model and the method.

    Attributes:
        texts: None for no text.
        tokens: How many tokens to use, in blocks spread evenly over the start of each text (`eval.inputs.text.reach`).
        context: Tokens per block.
        refit: Whether layers are converted in order, each behind the converted ones, and least squares refits queries, keys,
            values (GQA) and output projections.
        max_context: Tokens of the longest context that the result is for; None for all positions of the source, or, where
            positions cannot skip, for `context`.
        no_text: Whether methods that use text have to do without; otherwise the model writes one where none is given.
        heal: Tokens of the text that the whole result is distilled on at the end; None where the device decides.
    """

    texts: Texts = ()
    tokens: int | None = None
    context: int | None = None
    refit: bool | None = None
    max_context: int | None = None
    no_text: bool = False
    heal: int | None = None

    @property
    def flags(self) -> str:
        """The options that are set, for messages."""
        names = ["text" if name == "strings" else name for name, value in _as_options(self).items() if value]
        return " and ".join(sorted(f"--{name.replace('_', '-')}" for name in names))


@dataclass(frozen=True)
class Calibration:
    """The calibration of a plan, with every number decided. Attributes as in CalibrationOptions.

    `heal` is None until it is known what the device has room for (`convert.planning.base`).

    Attributes:
        retrieval_limit: Every other block retrieves, below that position (`convert.planning.retrieval`); None for no block.
    """

    texts: Texts
    tokens: int
    context: int
    refit: bool
    max_context: int
    retrieval_limit: int | None = None
    heal: int | None = 0

    @property
    def blocks(self) -> list[int]:
        """How many blocks each text gives, if it has as many."""
        return shared_out(self.tokens // self.context, self.texts)

    @property
    def blocks_to_heal_on(self) -> int:
        """How many other blocks each text gives to heal on, and to judge the healing by, if it has as many."""
        tokens = min(self.heal, MOST_WRITTEN) + LEAST_BLOCKS * self.heal_context if self.heal else 0
        return -(-tokens // (self.context * len(self.texts)))

    @property
    def rows_to_write(self) -> int:
        """How many blocks to calibrate on the model writes itself. If any, it writes `blocks_to_heal_on`, too."""
        return sum(count for count, text in zip(self.blocks, self.texts, strict=True) if text.own and not text.written)

    @property
    def skips_to(self) -> int | None:
        """The limit of positions that skip, which are more than those of a block; None where they do not."""
        return self.retrieval_limit if self.retrieval_limit and self.retrieval_limit > self.context else None

    @property
    def heal_context(self) -> int:
        """Tokens of the blocks that a healing sees: blocks of the calibration, or equal parts of these."""
        return self.context // -(-self.context // _HEALED_CONTEXT)

    def as_options(self) -> dict[str, Any]:
        """The options of the command line."""
        idle = {"max_context"} if self.retrieval_limit is None else set()
        return {name: value for name, value in _as_options(self).items() if name not in idle}


def _as_options(of: CalibrationOptions | Calibration) -> dict[str, Any]:
    """All of them, as on the command line."""
    return {
        **as_options(of.texts),
        "calibration_tokens": of.tokens,
        "calibration_context": of.context,
        "max_context": of.max_context,
        "refit": of.refit,
        "heal": of.heal,
    }


@dataclass(frozen=True)
class CalibrationText:
    """The text of a calibration, whose parts have been read, but for what the model writes itself.

    Attributes:
        calibration: How it is used.
        parts: Of each text whole blocks: first those to calibrate on, spread evenly over it, then others to heal on, if it has
            more. The model's own text is empty until it is written.
        whole: Each text but the model's own, as far as it was read.
        others: Of each of these blocks to check the result on. They are in no part, unless the text has no more.
    """

    calibration: Calibration
    parts: tuple[Tokens, ...]
    whole: tuple[Tokens, ...]
    others: tuple[Tokens, ...]

    @classmethod
    def read(cls, source: Source, calibration: Calibration) -> CalibrationText:
        """Read the texts, and encode them with the source's tokenizer.

        Raises:
            Failure: A text cannot be read, or is shorter than one block.
        """
        parts: list[Tokens] = []
        whole: list[Tokens] = []
        others: list[Tokens] = []
        for text, count in zip(calibration.texts, calibration.blocks, strict=True):
            if text.own:
                before = written_before(source, text.written, count, calibration.context) if text.written else None
                parts.append(own_tokens(OWN.label, before))
                continue
            share, context = count * calibration.context, calibration.context
            tokens = tokens_of(source, text.read(), reach(share))
            if (there := len(tokens.ids)) < context:
                raise Failure(
                    f"calibration text {tokens.name} has {there} tokens, fewer than one block of {context}",
                    hint=f"give a longer text, or --calibration-context {there} or less",
                )
            part, checked = tokens.spread(share, context), max(_OTHERS, context)
            beside = tokens.beside(share, context, checked + calibration.blocks_to_heal_on * context)
            if len(calibration.texts) > 1 and len(part.ids) < share:
                _log.warning("%s has %d of the %d tokens of its share", tokens.name, len(part.ids), share)
            spare = beside and beside.beside(checked, context, len(beside.ids))
            parts.append(replace(part, ids=torch.cat((part.ids, spare.ids))) if spare else part)
            whole.append(tokens)
            others.append((beside or part).spread(checked, context))
        return cls(calibration, tuple(parts), tuple(whole), tuple(others))

    @property
    def hashes(self) -> list[str | None]:
        """Of each text as far as it was read; None for what the model has still to write."""
        read, parts = iter(self.whole), zip(self.calibration.texts, self.parts, strict=True)
        return [(part if text.own else next(read)).hash if len(part.ids) else None for text, part in parts]

    def with_own(self, written: torch.Tensor | None) -> CalibrationText:
        """The whole text; `written [n, context]` is what the model wrote, None where it writes nothing."""
        return replace(self, parts=tuple(part if len(part.ids) else own_tokens(OWN.label, written) for part in self.parts))

    @property
    def own(self) -> torch.Tensor | None:
        """The model's own text, `[rows, context]`; None without."""
        parts = zip(self.calibration.texts, self.parts, strict=True)
        return next((part.blocks(self.calibration.context) for text, part in parts if text.own), None)

    @functools.cached_property
    def fitted(self) -> list[Tokens]:
        """Of each text what is calibrated on."""
        counts = zip(self.parts, self.calibration.blocks, strict=True)
        return [replace(part, ids=part.ids[: count * self.calibration.context]) for part, count in counts]

    @functools.cached_property
    def tokens(self) -> Tokens:
        """All that is calibrated on, one text after the other."""
        return joined(self.fitted)

    @property
    def to_heal_on(self) -> Tokens:
        """Blocks of each text that nothing was fitted to, or all of its blocks where those are too few."""
        wanted, found = self.calibration.blocks_to_heal_on * self.calibration.context, []
        for part, fitted in zip(self.parts, self.fitted, strict=True):
            spare = part.ids[len(fitted.ids) :][:wanted]
            found.append(spare if len(spare) == wanted else part.ids)
        return replace(self.tokens, ids=torch.cat(found))

    @property
    def blocks(self) -> Blocks:
        """The ids, `[n, T]`."""
        rows, limit = self.tokens.blocks(self.calibration.context), self.calibration.retrieval_limit
        if limit is None:
            return Blocks.whole(rows)
        plain, others = (rows[::2], rows[1::2]) if len(rows) > 1 else (rows[:0], rows)
        first, (retrieved, positions) = Blocks.whole(plain), retrieving(others, limit)
        return Blocks(torch.cat((first.rows, retrieved)), torch.cat((first.positions, positions)))

    def surveyed(self) -> CalibrationText:
        """The text that a survey of the source reads: all, or the same part of each where layers then see all in sequence."""
        context, whole = self.calibration.context, len(self.tokens.ids)
        count = max(context, min(whole, _DECIDED_ON) if self.calibration.refit else whole)
        counts = [max(1, count * len(part.ids) // whole // context) * context for part in self.fitted]
        return replace(self, parts=tuple(part.spread(n, context) for part, n in zip(self.fitted, counts, strict=True)))

    def remarks(self, width: int) -> list[str]:
        """A remark if the text is short for a model of width `width`."""
        wanted = _TOKENS_PER_CHANNEL * width
        if len(self.tokens.ids) >= wanted:
            return []
        return [
            f"{len(self.tokens.ids)} tokens of calibration text are few for {width} channels, {wanted} or more are advised: "
            "correlations between channels are trusted less"
        ]


def calibration_for(positions: int | None, skips: bool, method: Method, wanted: CalibrationOptions) -> Calibration | None:
    """Check the options and decide their numbers; None if there is no text and none is needed.

    Args:
        positions: The most that the source supports; None if its config does not say.
        skips: Whether positions may skip within a block (`Family.skips`).
        method: The method of the conversion.
        wanted: The user's options.

    Raises:
        Refusal: The method needs text and has none, or cannot use it.
    """
    if method.text is not TextUse.IGNORED or wanted.refit or wanted.heal:
        wanted = with_own_text(wanted)
    if not wanted.texts and method.text is TextUse.NEEDED:
        without = [name for name in methods.LATENT if methods.load_latent(name).text is not TextUse.NEEDED]
        raise Refusal(
            f"method {method.name} needs text to calibrate on",
            hint=f"give --text FILE or --dataset NAME; {' or '.join(without)} needs none",
        )
    require_consistent(positions, wanted)
    if not wanted.texts:
        return None
    if method.text is TextUse.IGNORED and not (wanted.refit or wanted.heal is not None):
        raise Refusal(f"method {method.name} looks at weights only and has no use for {wanted.flags}", hint="leave it out")
    if method.text is not TextUse.USED and wanted.max_context is not None:
        raise Refusal(f"method {method.name} has no use for --max-context", hint="leave it out")
    tokens, context = _numbers(positions, wanted)
    longest = context if wanted.max_context is None else wanted.max_context
    if skips and method.text is TextUse.USED:
        longest = wanted.max_context or positions or context
    elif longest > context:
        raise Refusal(
            f"positions of this model cannot skip, and no block of {context} tokens shows how it attends {longest} tokens back",
            hint=f"leave out --max-context, or give --calibration-context {longest}, too",
        )
    retrieval_limit = max(longest, context) if method.text is TextUse.USED else None
    refit = method.text is TextUse.USED if wanted.refit is None else wanted.refit
    heal = wanted.heal if wanted.heal is not None or method.text is TextUse.USED else 0
    return Calibration(wanted.texts, tokens, context, refit, longest, retrieval_limit, heal)


def with_own_text(wanted: CalibrationOptions) -> CalibrationOptions:
    """The options, with what the model writes itself where no text is given."""
    return wanted if wanted.texts or wanted.no_text else replace(wanted, texts=DEFAULT)


def require_consistent(positions: int | None, wanted: CalibrationOptions) -> None:
    """Check the options, independent of the method.

    Raises:
        Refusal: Its options contradict each other or the source.
    """
    if wanted.texts and wanted.no_text:
        raise Refusal("give either a text to calibrate on or --no-text")
    if wanted.texts:
        _numbers(positions, wanted)
    elif flags := wanted.flags:
        raise Refusal(
            f"{flags} {'is' if ' ' not in flags else 'are'} about calibration text, and there is none",
            hint="give --text FILE or --dataset NAME",
        )


def _numbers(limit: int | None, wanted: CalibrationOptions) -> tuple[int, int]:
    """Tokens in all, and per block."""
    own = any(text.own for text in wanted.texts)
    usual = min(_CONTEXT, limit or _CONTEXT)
    context = (min(_OWN_CONTEXT, usual) if own else usual) if wanted.context is None else wanted.context
    if limit and context > limit:
        raise Refusal(
            f"a calibration context of {context} tokens exceeds the {limit} positions of the model",
            hint=f"use --calibration-context {limit} or less",
        )
    tokens = (_OWN_TOKENS if own else _TOKENS) if wanted.tokens is None else wanted.tokens
    if tokens < context:
        raise Refusal(
            f"{tokens} calibration tokens are less than one block of {context}",
            hint="raise --calibration-tokens, or lower --calibration-context",
        )
    shared_out(tokens // context, wanted.texts)
    if limit and (wanted.max_context or 0) > limit:
        raise Refusal(
            f"a --max-context of {wanted.max_context} tokens exceeds the {limit} positions of the model",
            hint=f"use --max-context {limit} or less",
        )
    return tokens, context
