"""Turns the arguments of `convert gqa` and `convert mqa` into a Plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention.errors import Refusal
from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert import methods
from convert.families.reading import require_proved
from convert.hosts import HOSTS
from convert.hosts.engines import engine_of
from convert.methods.text import TextUse
from convert.output.destination import check_output
from convert.planning.allowed import convertible, host_of, require_served, require_stored, unfit
from convert.planning.base import Plan, Request
from convert.planning.calibration import calibration_for
from convert.planning.held import require_held
from convert.planning.targets import GroupedTarget

if TYPE_CHECKING:
    from convert.families import Family
    from convert.hosts.engines import Engine
    from convert.methods.grouped import GroupedMethod


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
    spec = before.grouped(groups)
    require_proved(family)
    require_served(output.dtype or source.dtype)
    hosts = [host for host in HOSTS["mqa" if groups == 1 else "gqa"] if output_class in (None, host.kind)]
    engine = engine_of(output.engine)
    host = host_of(hosts, family, spec, engine, "leave out --class" if output_class else None)
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


def _refuse_clip(clip: float, method: GroupedMethod, cache_dtype: str | None) -> None:
    """Refuse what changes projections, and makes up for it later, where a clamp comes between."""
    clamped = f"queries, keys and values are clamped to {clip} (clip_qkv in config.json), and"
    if cache_dtype is not None:
        raise Refusal(
            f"{clamped} --cache-dtype {cache_dtype} changes their size before that",
            hint="use --class kvfold, which does so behind the clamp, or leave out --cache-dtype",
        )
    if method.text is not TextUse.IGNORED:
        able = [name for name in methods.GROUPED if methods.load_grouped(name).text is TextUse.IGNORED]
        raise Refusal(
            f"{clamped} method {method.name} changes their size before that",
            hint=f"use --class kvfold, which shares heads behind the clamp, or --method {' or '.join(able)}",
        )


def _inexact(family: Family, target: AttentionSpec, engine: Engine | None, method: GroupedMethod, behind: bool) -> list[str]:
    """Notes on norms before which heads are merged; there are none if heads are shared `behind` the source's projections."""
    notes: list[str] = []
    if behind:
        return notes
    norm = family.traits.qk_norm
    if method.text is not TextUse.IGNORED and norm:
        note = "queries and keys are normalised, which costs in this class"
        kvfolds = [host for host in HOSTS["gqa"] if host.kind == "kvfold"]
        if any(unfit(host, family, target, engine) is None for host in kvfolds):
            note += "; gqa --class kvfold shares keys behind that, for less"
        notes.append(note)
    if norm and norm.per_head:
        notes.append("inexact: keys are normalised with gains per head, and merged heads get the merged gains of their group")
    return notes
