"""The text of a latent, and what `mla --portable` needs besides a size: text, the refit, and an engine that runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attention.errors import Refusal
from convert import methods
from convert.hosts import PORTABLE
from convert.methods.text import TextUse
from convert.planning.allowed import unfit
from convert.planning.calibration import calibration_for, with_own_text

if TYPE_CHECKING:
    from attention.spec import AttentionSpec
    from convert.families import Family
    from convert.hosts import Host
    from convert.hosts.engines import Engine
    from convert.methods.latent import LatentMethod
    from convert.planning.calibration import Calibration, CalibrationOptions


def _portable_calibration(method: LatentMethod, options: CalibrationOptions) -> CalibrationOptions:
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


def latent_calibration(
    positions: int | None, method: LatentMethod, calibration: CalibrationOptions, host: Host, per_layer_ranks: bool
) -> Calibration | None:
    """The calibration of a latent, in any output class; None without text.

    Raises:
        Refusal: Ranks per layer or a portable result need text and have none; or as of `calibration_for`.
    """
    if host.portable:
        calibration = _portable_calibration(method, calibration)
    without = [name for name in methods.LATENT if methods.load_latent(name).text is not TextUse.NEEDED]
    text = calibration_for(positions, method, calibration, without)
    if per_layer_ranks and text is None:
        raise Refusal("--per-layer-ranks needs calibration text, by which it chooses", hint="leave out --no-text")
    return text


def portable_hint(family: Family, target: AttentionSpec, engine: Engine | None) -> str | None:
    """The next step if no other class is for the engine; None if this one is not, either."""
    for host in PORTABLE:
        if engine and unfit(host, family, target, engine) is None:
            return f"give --portable and --text FILE: {engine.name} runs a {host.name}"
    return None
