"""Turns the arguments of `convert gqa` and `convert mqa` into a Plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention.errors import Refusal
from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert import methods
from convert.families.reading import require_proved
from convert.hosts import HOSTS
from convert.hosts.engines import engine_of
from convert.methods.text import TextUse
from convert.output.destination import check_output
from convert.planning.base import (
    Plan,
    Request,
    convertible,
    host_of,
    require_change,
    require_stored,
    stored_dtype,
    text_notes,
    unfit,
)
from convert.planning.calibration import calibration_for
from convert.planning.held import require_held
from convert.planning.memory import require_room_to_write, with_default_healing
from convert.planning.targets import GroupedTarget
from eval.machine.device import compute_device, require_device

if TYPE_CHECKING:
    from convert.families import Family
    from convert.families.base import Traits
    from convert.hosts.engines import Engine
    from convert.methods.grouped import GroupedMethod
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
    require_device(request.device)
    source, output, device = request.source, request.output, compute_device(request.device)
    family = convertible(source)
    before = family.spec
    spec = before.grouped(groups)
    require_proved(family)
    kind = "mqa" if groups == 1 else "gqa"
    stored_dtype(source, output)  # refuses what no engine serves
    hosts = [host for host in HOSTS[kind] if output_class in (None, host.kind)]
    engine = engine_of(output.engine)
    host = host_of(hosts, family, source, spec, engine, "leave out --class" if output_class else None)
    require_held(host, family, source)
    if engine:
        require_stored(engine, cache_dtype, engine.stores(host, spec))
    behind = host.reads_projections(family)
    spec.bytes_per_token(cache_dtype or source.dtype)  # refuses sizes that the format does not take
    changes = spec != before or rounding_of(cache_dtype) is not None
    traits = family.traits
    if changes and not behind:
        _check_clip(source, method, traits, cache_dtype)
    text = calibration_for(source, method, request.calibration, methods.GROUPED)
    check_output(output.path, source.directory, output.overwrite, output.resume)
    if spec == before and changes and text is None:
        raise Refusal(
            f"{source.reference} has {before.num_kv_heads} KV heads: without text, nothing of it changes for {cache_dtype}",
            hint="leave out --no-text, and give a --method that uses text",
        )
    remarks = tuple(text_notes(method, text, traits.behind_projections if behind else traits))
    if spec != before:
        notes = (*_inexact(family, spec, engine, method, behind), *host.notes(family))
    elif changes:
        stay = f"its {before.num_kv_heads} KV heads stay, and are only made fit for a cache in {cache_dtype}"
        notes = (stay, *host.notes(family))
    else:
        how = f"every tensor is cast to {output.dtype} and otherwise" if output.dtype else "every tensor is copied bit for bit,"
        notes = (f"{before.num_kv_heads} KV heads are what the source has: {how} unchanged",)
        remarks = ("the calibration text is not used",) if text else ()
    options = _options(command, groups, output_class)
    target = GroupedTarget(command, options, before, spec, method, host, notes, cache_dtype)
    text = None if target.copies else text  # a copy needs no calibration
    require_room_to_write(source, text, device)
    text = with_default_healing(source, text, device)
    # Pooling heads is too little work to be worth moving weights.
    pooling = request.device == "auto" and method.text is TextUse.IGNORED and text is None
    return require_change(Plan(request, family, target, text, "cpu" if pooling else str(device), remarks))


def _options(command: str, groups: int, output_class: str | None) -> dict[str, Any]:
    of_class = {} if output_class is None else {"class": output_class}
    return of_class if command == "mqa" else {"groups": groups} | of_class


def _check_clip(source: Source, method: GroupedMethod, traits: Traits, cache_dtype: str | None) -> None:
    """Refuse what changes projections, and makes up for it later, where a clamp comes between."""
    if traits.clip is not None and rounding_of(cache_dtype) is not None:
        raise Refusal(
            f"{source.reference} clamps queries, keys and values to {traits.clip} (clip_qkv), and --cache-dtype {cache_dtype} "
            "changes their size before that",
            hint="use --class kvfold, which does so behind the clamp, or leave out --cache-dtype",
        )
    if traits.clip is None or method.text is TextUse.IGNORED:
        return
    able = [name for name in methods.GROUPED if methods.load_grouped(name).text is TextUse.IGNORED]
    raise Refusal(
        f"{source.reference} clamps queries, keys and values to {traits.clip} (clip_qkv), and method {method.name} changes "
        "their size before that",
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
