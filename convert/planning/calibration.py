"""The text that a plan calibrates on, and what is done with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attention.errors import Failure, Refusal
from convert.families import Family
from convert.methods.grouped import GroupedMethod
from convert.methods.latent import LatentMethod
from convert.methods.text import TextUse
from eval.evaluation import tokens_of
from eval.source import Source
from eval.text import Text, Tokens

_TOKENS = 131072
_TOKENS_PER_CHANNEL = 8


@dataclass(frozen=True)
class Calibration:
    """The text that a method takes its statistics from, how much of it, and steps that need it as well.

    Attributes:
        given: What names it on the command line: {"text": FILE} or {"dataset": NAME}; {} for no text.
        tokens: So many from its start, in whole blocks; None, until it is planned, for 131072.
        context: Tokens of one block; None, until it is planned, for min(2048, the model's limit).
        propagate: Whether a layer's statistics come through the layers that were converted before it.
        refit: Whether queries and output projections are fitted by least squares; None, until it is planned, for whether the
            method uses text.
        refine: How many steps of gradient descent each layer's attention takes towards what its source computes.
    """

    given: dict[str, str] = field(default_factory=dict)
    tokens: int | None = None
    context: int | None = None
    propagate: bool = False
    refit: bool | None = None
    refine: int = 0

    @property
    def in_sequence(self) -> bool:
        """Whether layers are converted in order, each behind the converted ones."""
        return bool(self.propagate or self.refit or self.refine)

    @property
    def flags(self) -> str:
        """Its options that are given, for people."""
        return " and ".join(sorted(f"--{name.replace('_', '-')}" for name, value in self.as_options().items() if value))

    def as_options(self) -> dict[str, Any]:
        """As on the command line."""
        return {
            **self.given,
            "calibration_tokens": self.tokens,
            "calibration_context": self.context,
            **({"propagate": True} if self.propagate else {}),
            **({} if self.refit is None else {"refit": self.refit}),
            **({"refine": self.refine} if self.refine else {}),
        }

    def as_recipe(self) -> dict[str, Any]:
        """The same, to be read from another directory."""
        text = {"text": str(Path(self.given["text"]).resolve())} if "text" in self.given else {}
        return self.as_options() | text


def calibration_for(
    source: Source, family: Family, method: GroupedMethod | LatentMethod, wanted: Calibration, without: Sequence[str]
) -> Calibration | None:
    """What is wanted, checked and with its numbers; None where there is no text and none is needed.

    Args:
        source: What is converted.
        family: How it is read.
        method: Which method.
        wanted: From the command line.
        without: Names of methods that need no text.

    Raises:
        Refusal: Text is missing, or of no use.
    """
    if not wanted.given and method.text is TextUse.NEEDED:
        raise Refusal(
            f"method {method.name} needs text to calibrate on",
            hint=f"give --text FILE or --dataset NAME; {' or '.join(without)} needs none",
        )
    planned = checked(source, wanted)
    if not wanted.given:
        return None
    if method.text is TextUse.IGNORED and (wanted.propagate or not (wanted.refit or wanted.refine)):
        idle = "--propagate" if wanted.refit or wanted.refine else wanted.flags
        raise Refusal(f"method {method.name} looks at weights only and has no use for {idle}", hint="leave it out")
    return replace(planned, refit=method.text is TextUse.USED) if planned.refit is None else planned


def checked(source: Source, wanted: Calibration) -> Calibration:
    """What is wanted with its numbers, whatever the method.

    Raises:
        Refusal: Its options contradict each other or the source.
    """
    if wanted.given:
        return _with_numbers(source, wanted)
    if flags := wanted.flags:
        raise Refusal(
            f"{flags} {'is' if ' ' not in flags else 'are'} about calibration text, and there is none",
            hint="give --text FILE or --dataset NAME",
        )
    return wanted


def calibration_tokens(source: Source, calibration: Calibration | None, text: Text | None) -> Tokens | None:
    """What a method is calibrated on: whole blocks from the start of the text.

    Raises:
        Failure: The text is shorter than one block.
    """
    if calibration is None or text is None:
        return None
    tokens, context = tokens_of(source, text, calibration.tokens), calibration.context or 1
    if len(tokens.ids) < context:
        raise Failure(
            f"calibration text {tokens.name} has {len(tokens.ids)} tokens, fewer than one block of {context}",
            hint=f"give a longer text, or --calibration-context {len(tokens.ids)} or less",
        )
    return replace(tokens, ids=tokens.ids[: len(tokens.ids) // context * context])


def remarks(tokens: Tokens | None, width: int) -> list[str]:
    """What to say of a calibration text that is short for a model of that width."""
    wanted = _TOKENS_PER_CHANNEL * width
    if tokens is None or len(tokens.ids) >= wanted:
        return []
    return [
        f"{len(tokens.ids)} tokens of calibration text are few for {width} channels, {wanted} or more are advised: what they "
        "say of channels together is trusted less"
    ]


def _with_numbers(source: Source, wanted: Calibration) -> Calibration:
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
    return replace(wanted, tokens=tokens, context=context)
