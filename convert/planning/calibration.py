"""The text that a plan calibrates on, and the steps that use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention.errors import Failure, Refusal
from convert.methods.text import TextUse

if TYPE_CHECKING:
    from convert.methods.blocks import Blocks
    from convert.methods.grouped import GroupedMethod
    from convert.methods.latent import LatentMethod
    from eval.source import Source
    from eval.text import Text, Tokens

_TOKENS = 32768
_TOKENS_PER_CHANNEL = 8
_DECIDED_ON = 8192  # tokens: with four times as many, only choices between near ties differed


@dataclass(frozen=True)
class CalibrationOptions:
    """The user's calibration options. Numbers left as None depend on the model and the method.

    Attributes:
        given: The text: {"text": FILE} or {"dataset": NAME}; empty for no text.
        tokens: How many tokens to use, in blocks spread evenly over the text.
        context: Tokens per block; if they are few and long, some are cut into shorter ones (`convert.methods.blocks`).
        propagate: Whether a layer's statistics are measured behind the layers converted before it.
        refit: Whether least squares refits queries, keys, values (GQA) and output projections.
        refine: Steps of gradient descent that fit each layer's attention to the source's.
        max_context: Tokens of the longest context that the result is for; None for `context`.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    tokens: int | None = None
    context: int | None = None
    propagate: bool = False
    refit: bool | None = None
    refine: int = 0
    max_context: int | None = None

    @property
    def flags(self) -> str:
        """The options that are set, for messages."""
        values = {
            **{"text" if name == "strings" else name: value for name, value in self.given.items()},
            "calibration-tokens": self.tokens,
            "calibration-context": self.context,
            "max-context": self.max_context,
            "propagate": self.propagate,
            "refit": self.refit,
            "refine": self.refine,
        }
        return " and ".join(sorted(f"--{name}" for name, value in values.items() if value))

    @property
    def steps(self) -> CalibrationOptions:
        """The same without the text: only the steps beyond a method."""
        return CalibrationOptions(propagate=self.propagate, refit=self.refit, refine=self.refine)

    @property
    def text_alone(self) -> CalibrationOptions:
        """The same without steps beyond a method, and for the context of its blocks."""
        return CalibrationOptions(self.given, self.tokens, self.context)


@dataclass(frozen=True)
class Calibration:
    """The calibration of a plan, with every number decided. Attributes as in CalibrationOptions."""

    given: Mapping[str, str]
    tokens: int
    context: int
    propagate: bool
    refit: bool
    refine: int
    max_context: int

    @property
    def name(self) -> str:
        """The text or the dataset, for people."""
        return f"{self.given['strings']} strings" if "strings" in self.given else next(iter(self.given.values()))

    @property
    def in_sequence(self) -> bool:
        """Whether layers are converted in order, each behind the converted ones."""
        return bool(self.propagate or self.refit or self.refine)

    @property
    def fitted(self) -> bool:
        """Whether layers are fitted to the outputs of the source's layers."""
        return bool(self.refit or self.refine)

    def as_options(self) -> dict[str, Any]:
        """The options of the command line."""
        return {
            **self.given,
            "calibration_tokens": self.tokens,
            "calibration_context": self.context,
            **({"max_context": self.max_context} if self.max_context != self.context else {}),
            **({"propagate": True} if self.propagate else {}),
            "refit": self.refit,
            **({"refine": self.refine} if self.refine else {}),
        }

    def as_recipe(self) -> dict[str, Any]:
        """The options with an absolute path, for a recipe that is read from another directory."""
        text = {"text": str(Path(self.given["text"]).resolve())} if "text" in self.given else {}
        return self.as_options() | text

    def steps(self) -> list[str]:
        """The steps beyond the method, as on the command line."""
        return [
            *(["--propagate"] if self.propagate else []),
            *(["--refit"] if self.refit else []),
            *([f"--refine {self.refine}"] if self.refine else []),
        ]


@dataclass(frozen=True)
class CalibrationText:
    """A calibration whose text has been read.

    Attributes:
        plan: How the text is used.
        tokens: The text's tokens: whole blocks, spread evenly over it.
    """

    plan: Calibration
    tokens: Tokens

    @classmethod
    def of(cls, source: Source, plan: Calibration, text: Text) -> CalibrationText:
        """Encode the text with the source's tokenizer.

        Raises:
            Failure: The text is shorter than one block.
        """
        from eval.evaluation import tokens_of
        from eval.text import reach

        tokens = tokens_of(source, text, reach(plan.tokens))
        if len(tokens.ids) < plan.context:
            raise Failure(
                f"calibration text {tokens.name} has {len(tokens.ids)} tokens, fewer than one block of {plan.context}",
                hint=f"give a longer text, or --calibration-context {len(tokens.ids)} or less",
            )
        return cls(plan, tokens.spread(plan.tokens, plan.context))

    @property
    def blocks(self) -> Blocks:
        """The ids, `[n, T]`."""
        from convert.methods.blocks import Blocks

        return Blocks.mixed(self.tokens.blocks(self.plan.context))

    def surveyed(self, parts: int = 1) -> CalibrationText:
        """What a survey of the source reads, which `parts` processes share: see `surveyed_tokens`."""
        count = max(surveyed_tokens(self.plan, len(self.tokens.ids)), parts * self.plan.context)
        return replace(self, tokens=self.tokens.spread(count, self.plan.context))

    def remarks(self, width: int) -> list[str]:
        """A remark if the text is short for a model of width `width`."""
        wanted = _TOKENS_PER_CHANNEL * width
        if len(self.tokens.ids) >= wanted:
            return []
        return [
            f"{len(self.tokens.ids)} tokens of calibration text are few for {width} channels, {wanted} or more are advised: "
            "correlations between channels are trusted less"
        ]


def surveyed_tokens(plan: Calibration, tokens: int) -> int:
    """Of a text's tokens those that a survey reads: all, or a part where layers then see all of them in sequence."""
    return min(tokens, max(_DECIDED_ON, plan.context)) if plan.in_sequence else tokens


def calibration_for(
    source: Source, method: GroupedMethod | LatentMethod, wanted: CalibrationOptions, without: Sequence[str]
) -> Calibration | None:
    """Check the options and decide their numbers; None if there is no text and none is needed.

    Args:
        source: The checkpoint to convert.
        method: The method of the conversion.
        wanted: The user's options.
        without: Names of methods that need no text.

    Raises:
        Refusal: The method needs text and has none, or cannot use it.
    """
    if not wanted.given and method.text is TextUse.NEEDED:
        raise Refusal(
            f"method {method.name} needs text to calibrate on",
            hint=f"give --text FILE or --dataset NAME; {' or '.join(without)} needs none",
        )
    require_consistent(source, wanted)
    if not wanted.given:
        return None
    if method.text is TextUse.IGNORED and (wanted.propagate or not (wanted.refit or wanted.refine)):
        idle = "--propagate" if wanted.refit or wanted.refine else wanted.flags
        raise Refusal(f"method {method.name} looks at weights only and has no use for {idle}", hint="leave it out")
    if method.text is not TextUse.USED and wanted.max_context is not None:
        raise Refusal(f"method {method.name} has no use for --max-context", hint="leave it out")
    tokens, context, longest = _numbers(source, wanted)
    refit = method.text is TextUse.USED if wanted.refit is None else wanted.refit
    return Calibration(wanted.given, tokens, context, wanted.propagate, refit, wanted.refine, longest)


def require_consistent(source: Source, wanted: CalibrationOptions) -> None:
    """Check the options, independent of the method.

    Raises:
        Refusal: Its options contradict each other or the source.
    """
    if wanted.given:
        _numbers(source, wanted)
    elif flags := wanted.flags:
        raise Refusal(
            f"{flags} {'is' if ' ' not in flags else 'are'} about calibration text, and there is none",
            hint="give --text FILE or --dataset NAME",
        )


def _numbers(source: Source, wanted: CalibrationOptions) -> tuple[int, int, int]:
    """Tokens in all, per block, and in the longest context that the result is for."""
    limit = source.max_positions
    context = min(2048, limit or 2048) if wanted.context is None else wanted.context
    if limit and context > limit:
        raise Refusal(
            f"a calibration context of {context} tokens exceeds the {limit} positions of the model",
            hint=f"use --calibration-context {limit} or less",
        )
    tokens = _TOKENS if wanted.tokens is None else wanted.tokens
    if tokens < context:
        raise Refusal(
            f"{tokens} calibration tokens are less than one block of {context}",
            hint="raise --calibration-tokens, or lower --calibration-context",
        )
    longest = context if wanted.max_context is None else wanted.max_context
    if limit and longest > limit:
        raise Refusal(
            f"a --max-context of {longest} tokens exceeds the {limit} positions of the model",
            hint=f"use --max-context {limit} or less",
        )
    return tokens, context, longest
