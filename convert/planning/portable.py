"""Requirements of `mla --portable` besides a size: text, the refit, and an engine that runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attention.errors import Refusal
from convert import methods
from convert.hosts import PORTABLE
from convert.methods.text import TextUse
from convert.planning.base import unfit
from convert.planning.calibration import with_own_text

if TYPE_CHECKING:
    from attention.spec import AttentionSpec
    from convert.families import Family
    from convert.hosts.engines import Engine
    from convert.methods.latent import LatentMethod
    from convert.planning.calibration import CalibrationOptions


def portable_calibration(method: LatentMethod, options: CalibrationOptions) -> CalibrationOptions:
    """The user's options, with the refit.

    Raises:
        Refusal: There is no text, or the method or the options make no use of it.
    """
    if method.text is TextUse.IGNORED:
        raise Refusal(
            f"--portable needs calibration text, and method {method.name} has no use for it",
            hint=f"use --method {methods.LATENT[0]} or another that takes text",
        )
    if not with_own_text(options).texts:
        raise Refusal(
            "--portable needs calibration text: the norm of its latent is fitted to it",
            hint="leave out --no-text",
        )
    if options.refit is False:
        raise Refusal("--portable needs the refit: it fits weights to what the norm leaves", hint="leave out --no-refit")
    return replace(options, refit=True)


def portable_hint(family: Family, target: AttentionSpec, engine: Engine | None) -> str | None:
    """The next step if no other class is for the engine; None if this one is not, either."""
    for host in PORTABLE:
        if engine and unfit(host, family, target, engine) is None:
            return f"give --portable and --text FILE: {engine.name} runs a {host.name}"
    return None
