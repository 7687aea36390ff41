"""Turns the arguments of `convert gqa`, `convert mqa` and `convert mla` into a Plan, all from the config."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attention.errors import Refusal
from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert.families.reading import require_proved
from convert.hosts import HOSTS, PORTABLE, Host
from convert.hosts.engines import Engine, engine_of
from convert.methods import GROUPED, load_grouped
from convert.methods.text import TextUse
from convert.output.destination import check_output
from convert.planning.allowed import Kept, convertible, held_by, require_held, require_served, require_stored, staying, unfit
from convert.planning.base import Plan, Request
from convert.planning.budget import smallest_latent
from convert.planning.calibration import CalibrationOptions, calibration_for, with_own_text
from convert.planning.sizes import AUTO, LatentSize, Sizing
from convert.planning.targets import GroupedTarget

if TYPE_CHECKING:
    from convert.families import Family
    from convert.methods.grouped import GroupedMethod
    from convert.methods.latent import LatentMethod
    from eval.inputs.source import Source


def plan_grouped(
    request: Request,
    command: str,
    groups: int,
    method: GroupedMethod,
    output_class: str | None = None,
    cache_dtype: str | None = None,
) -> Plan:
    """Plan a conversion to `groups` KV heads.

    Args:
        request: What the user asks for besides.
        command: "gqa", which has the option `--groups`, or "mqa", which has not.
        groups: KV heads of the result.
        method: One of `methods.GROUPED`.
        output_class: One of CLASSES, or None for the first that can carry the result.
        cache_dtype: The format of the cache that the result is for; None for the dtype of its weights.

    Raises:
        Refusal: The conversion is not possible; with the reason and the next step.
    """
    source, output = request.source, request.output
    family = convertible(source)
    before = family.spec
    merged = before.grouped(groups)
    require_proved(family)
    require_served(output.dtype or source.dtype)
    hosts = [host for host in HOSTS["mqa" if groups == 1 else "gqa"] if output_class in (None, host.kind)]
    engine, hint = engine_of(output.engine), "leave out --class" if output_class else None
    kept = staying(family, request.keep_layers, request.all_layers)
    if merged == before:
        if kept.required:
            raise Refusal(f"all {groups} KV heads stay, in all layers", hint="leave out --keep-layers")
        kept = Kept((), required=False)
    host, spec = held_by(hosts, family, merged, kept, engine, hint)
    require_held(host, family)
    if engine:
        require_stored(engine, cache_dtype, engine.stores(host, spec))
    spec.bytes_per_token(cache_dtype or source.dtype)  # refuses sizes that the format does not take
    rounds, traits = rounding_of(cache_dtype) is not None, family.traits
    behind = host.reads_projections(family)
    if (spec != before or rounds) and traits.clip is not None and not behind:
        _refuse_clip(traits.clip, method, cache_dtype if rounds else None)
    text = calibration_for(source.max_positions, family.skips, method, request.text)
    check_output(output, source.directory)
    heads = before.num_kv_heads
    if spec == before and rounds and text is None:
        raise Refusal(
            f"{source.reference} has {heads} KV heads: without text, nothing of it changes for {cache_dtype}",
            hint="leave out --no-text, and give a --method that uses text",
        )
    if spec != before:
        notes = (*_inexact(family, spec, engine, method, behind), *host.notes(family))
    elif rounds:
        notes = (f"its {heads} KV heads stay, and are only made fit for a cache in {cache_dtype}", *host.notes(family))
    else:
        how = f"every tensor is cast to {output.dtype} and otherwise" if output.dtype else "every tensor is copied bit for bit,"
        notes = (f"{heads} KV heads are what the source has: {how} unchanged",)
    if kept.layers and not kept.required:
        notes = (*notes, _windowed(source, spec, cache_dtype or output.dtype or source.dtype))
    options = ({} if output_class is None else {"class": output_class}) | ({} if command == "mqa" else {"groups": groups})
    target = GroupedTarget(
        before=before,
        spec=spec,
        method=method,
        host=host,
        notes=notes,
        cache_dtype=cache_dtype,
        command=command,
        options=options,
    )
    return Plan.of(request, family, target, text)


def _windowed(source: Source, spec: AttentionSpec, form: str) -> str:
    """A note on layers whose cache does not grow."""
    if not spec.kept:
        return "no class that can hold the result keeps layers with a window as they are: they are converted, too"
    context = source.longest_context
    kept, whole = (one.bytes_per_token(form, context) for one in (spec, spec.keeping((), 0)))
    said = f"layers with a window stay as they are: {kept:.0f} bytes per token at {context:,} tokens"
    return f"{said}, and {whole:.0f} with --all-layers, which leaves them in the source's class if that can hold the result"


def _refuse_clip(clip: float, method: GroupedMethod, cache_dtype: str | None) -> None:
    """Refuse what changes projections, and makes up for it later, where a clamp comes between."""
    clamped = f"queries, keys and values are clamped to {clip} (clip_qkv in config.json), and"
    if cache_dtype is not None:
        raise Refusal(
            f"{clamped} --cache-dtype {cache_dtype} changes their size before that",
            hint="use --class kvfold, which does so behind the clamp, or leave out --cache-dtype",
        )
    if method.text is not TextUse.IGNORED:
        able = [name for name in GROUPED if load_grouped(name).text is TextUse.IGNORED]
        raise Refusal(
            f"{clamped} method {method.name} changes their size before that",
            hint=f"use --class kvfold, which shares heads behind the clamp, or --method {' or '.join(able)}",
        )


def _inexact(family: Family, target: AttentionSpec, engine: Engine | None, method: GroupedMethod, behind: bool) -> list[str]:
    """Notes on norms before which heads are merged; there are none if heads are shared `behind` the source's projections."""
    notes, norm = list[str](), None if behind else family.traits.qk_norm
    if method.text is not TextUse.IGNORED and norm:
        note = "queries and keys are normalised, which costs in this class"
        kvfolds = [host for host in HOSTS["gqa"] if host.kind == "kvfold"]
        if any(unfit(host, family, target, engine) is None for host in kvfolds):
            note += "; gqa --class kvfold shares keys behind that, for less"
        notes.append(note)
    if norm and norm.per_head:
        notes.append("inexact: keys are normalised with gains per head, and merged heads get the merged gains of their group")
    return notes


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
    dtype, engine = output.dtype or source.dtype, engine_of(output.engine)
    require_served(dtype)
    # Whether any latent fits the source comes first: it is what most users have to know.
    host, smallest = _host(family, size, request, engine)
    require_held(host, family, method)
    if engine and size.cache_dtype != AUTO:
        require_stored(engine, size.cache_dtype, engine.caches)
    target = Sizing(source, family, host, smallest.kept, method=method, engine=engine, dtype=dtype, size=size).target()
    if engine:
        require_stored(engine, target.cache_dtype, engine.stores(host, target.spec))
        if objection := engine.objection(host, family, target.spec):
            raise Refusal(objection, hint="give another --kv-lora-rank, or --kv-budget, which finds one")
    check_output(output, source.directory)
    calibration = _portable_calibration(method, request.text) if host.portable else request.text
    text = calibration_for(source.max_positions, family.skips, method, calibration)
    return Plan.of(request, family, target, text)


def _host(family: Family, size: LatentSize, request: Request, engine: Engine | None) -> tuple[Host, AttentionSpec]:
    """The first output class that carries a latent of the source, and the smallest, with the layers that stay."""
    kept = staying(family, request.keep_layers, request.all_layers)
    smallest = smallest_latent(family, kept.layers)
    if size.portable:
        return held_by(PORTABLE, family, smallest, kept, engine)
    runs = [host.name for host in PORTABLE if engine and unfit(host, family, smallest, engine) is None]
    hint = f"give --portable and --text FILE: {engine.name} runs a {runs[0]}" if engine and runs else None
    return held_by(HOSTS["mla"], family, smallest, kept, engine, hint)


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
        raise Refusal("--portable needs calibration text: the norm of its latent is fitted to it", hint="leave out --no-text")
    if options.refit is False:
        raise Refusal("--portable needs the refit: it fits weights to what the norm leaves", hint="leave out --no-refit")
    return replace(options, refit=True)
