"""Turns the arguments of `convert mla` into a Plan, all from the config; `sizes` has the numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attention.errors import Refusal
from convert.families.reading import require_proved
from convert.hosts import HOSTS, PORTABLE
from convert.hosts.engines import engine_of
from convert.methods.text import TextUse
from convert.output.destination import check_output
from convert.planning.allowed import convertible, host_of, require_served, require_stored, unfit
from convert.planning.base import Plan, Request
from convert.planning.budget import smallest_latent
from convert.planning.calibration import calibration_for, with_own_text
from convert.planning.held import require_held
from convert.planning.sizes import AUTO, LatentSize, Sizing

if TYPE_CHECKING:
    from convert.families import Family
    from convert.hosts import Host
    from convert.hosts.engines import Engine
    from convert.methods.latent import LatentMethod
    from convert.planning.calibration import CalibrationOptions


def plan_latent(request: Request, size: LatentSize, method: LatentMethod) -> Plan:
    """Plan a conversion to multi-head latent attention.

    Args:
        request: What the user asks for besides.
        size: Rank and rotary dims, or a budget.
        method: One of `methods.LATENT`.

    Raises:
        Refusal: The conversion is not possible; with the reason and the next step.
    """
    source, output = request.source, request.output
    family = convertible(source)
    require_proved(family)
    if size.per_layer_ranks and size.pad_rank:
        raise Refusal(
            "give either --per-layer-ranks or --pad-rank: no layer has a rank beyond full size", hint="leave out --pad-rank"
        )
    dtype, engine = output.dtype or source.dtype, engine_of(output.engine)
    require_served(dtype)
    # Whether any latent fits the source comes first: it is what most users have to know.
    host = _host(family, size, engine)
    require_held(host, family, method)
    if engine and size.cache_dtype != AUTO:
        require_stored(engine, size.cache_dtype, engine.caches)
    target = Sizing(source, family, host, method, engine, dtype, size).target()
    if engine:
        require_stored(engine, target.cache_dtype, engine.stores(host, target.spec))
        if objection := engine.objection(host, family, target.spec):
            raise Refusal(objection, hint="give another --kv-lora-rank, or --kv-budget, which finds one")
        if note := engine.note(target.before):  # what its user should know
            target = replace(target, notes=(*target.notes, note))
    check_output(output, source.directory)
    calibration = _portable_calibration(method, request.text) if host.portable else request.text
    text = calibration_for(source.max_positions, family.skips, method, calibration)
    if size.per_layer_ranks and text is None:
        raise Refusal("--per-layer-ranks needs calibration text, by which it chooses", hint="leave out --no-text")
    return Plan.of(request, family, target, text)


def _host(family: Family, size: LatentSize, engine: Engine | None) -> Host:
    """The first output class that carries a latent of the source."""
    smallest = smallest_latent(family)
    if size.per_layer_ranks:
        smallest = replace(smallest, layer_ranks=(1,) * family.spec.num_layers)
    if size.portable:
        return host_of(PORTABLE, family, smallest, engine)
    runs = [host.name for host in PORTABLE if engine and unfit(host, family, smallest, engine) is None]
    hint = f"give --portable and --text FILE: {engine.name} runs a {runs[0]}" if engine and runs else None
    return host_of(HOSTS["mla"], family, smallest, engine, hint)


def _portable_calibration(method: LatentMethod, options: CalibrationOptions) -> CalibrationOptions:
    """The user's options, with the refit.

    Raises:
        Refusal: There is no text, or the method or the options make no use of it.
    """
    if method.text is TextUse.IGNORED:
        raise Refusal(
            f"--portable needs calibration text, and method {method.name} has no use for it",
            hint="leave out --method, or give one that takes text",
        )
    if not with_own_text(options).texts:
        raise Refusal(
            "--portable needs calibration text: the norm of its latent is fitted to it",
            hint="leave out --no-text",
        )
    if options.refit is False:
        raise Refusal("--portable needs the refit: it fits weights to what the norm leaves", hint="leave out --no-refit")
    return replace(options, refit=True)
