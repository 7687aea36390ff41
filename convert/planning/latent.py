"""Turns the arguments of `convert mla` into a Plan: sizes, budgets and full rank, all from the config."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attention.errors import Refusal
from attention.formats import format_named, rounding_of
from attention.spec import RANK_STEP, AttentionSpec
from convert import methods
from convert.hosts import HOSTS, PORTABLE
from convert.hosts.engines import engine_of
from convert.methods.text import TextUse
from convert.output.destination import Output
from convert.planning.base import Plan, host_of, readable, require_stored, stored_dtype, text_notes
from convert.planning.budget import check_fold, default_fold, layer_ranks, served_rank
from convert.planning.calibration import CalibrationOptions, calibration_for
from convert.planning.memory import require_room_to_write, with_default_healing
from convert.planning.portable import portable_calibration, portable_hint
from convert.planning.room import full_rank, latent_for_budget, most_rotary_dims, rotary_dim, smallest_latent, with_reserved
from eval.machine.device import compute_device, require_device

if TYPE_CHECKING:
    from convert.families import Family
    from convert.hosts import Host
    from convert.hosts.engines import Engine
    from convert.methods.latent import LatentMethod
    from convert.planning.targets import LatentTarget
    from eval.inputs.source import Source


AUTO = "auto"
_TRIED = ("fp8", "int8", "int4", "int3", "int2")  # formats that --cache-dtype auto tries beside the dtype of the weights
_FEWEST_QUERY_CHANNELS = 8  # of a latent of queries: at most five are constants


@dataclass(frozen=True)
class LatentRequest:
    """The size of a latent that the user asks for: rank and rotary dims, or a budget.

    Attributes:
        kv_lora_rank: R, or None.
        qk_rope_head_dim: P, or None.
        kv_share: A share of the source's KV cache, or None.
        kv_bytes: Bytes per token in all layers, or None.
        freqfold: How many neighbouring frequencies count as one; None for as few as P allows.
        pad_rank: Whether the rank may exceed full rank, with channels of zeros.
        q_lora_rank: The rank of a latent of queries; None for what the output class needs.
        portable: Whether engines' own DeepSeek classes have to run the result.
        per_layer_ranks: Whether the text chooses the rank of each layer; R is then their mean, at most.
        cache_dtype: The format of the cache that the result is for; None for the dtype of its weights, and `AUTO` for the one
            that keeps most at a budget.
    """

    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    kv_share: float | None = None
    kv_bytes: int | None = None
    freqfold: int | None = None
    pad_rank: bool = False
    q_lora_rank: int | None = None
    portable: bool = False
    per_layer_ranks: bool = False
    cache_dtype: str | None = None


def plan_latent(
    source: Source,
    size: LatentRequest,
    method: LatentMethod,
    calibration: CalibrationOptions,
    device: str,
    output: Output,
    seed: int = 0,
) -> Plan:
    """Plan a conversion to multi-head latent attention.

    Args:
        source: The checkpoint to convert.
        size: Rank and rotary dims, or a budget.
        method: One of `methods.LATENT`.
        calibration: The user's calibration options.
        device: As on the command line.
        output: Where the result goes.
        seed: For the order in which refinement takes blocks of text; no method of this kind draws numbers.

    Raises:
        Refusal: The conversion is not possible; with the reason and the next step.
    """
    from convert.output.destination import check_output

    require_device(device)
    family = readable(source)
    before = family.spec(source.config)
    if size.per_layer_ranks and size.pad_rank:
        raise Refusal(
            "give either --per-layer-ranks or --pad-rank: no layer has a rank beyond full size", hint="leave out --pad-rank"
        )
    dtype = stored_dtype(source, output)
    # Whether any latent fits the source comes first: it is what most users have to know.
    engine = engine_of(output.engine)
    hosts = PORTABLE if size.portable else HOSTS["mla"]
    smallest = smallest_latent(source, family, before)
    if size.per_layer_ranks:
        smallest = replace(smallest, layer_ranks=(1,) * before.num_layers)
    host = host_of(hosts, family, source, smallest, engine, portable_hint(family, source, smallest, engine))
    if engine and engine.query_latent(before) and size.q_lora_rank is None:
        size = replace(size, q_lora_rank=host.full_query_rank(source.decoder.hidden_size))
    if engine and size.cache_dtype != AUTO:
        require_stored(engine, size.cache_dtype, engine.caches)
    padded = size.pad_rank or (engine is not None and size.kv_lora_rank is None and bool(engine.latents))
    targets = [
        _target(source, family, method, host, before, replace(whole, pad_rank=padded), dtype)
        for whole in _whole(source, family, before, size, host, dtype, engine)
    ]
    targets = [one for one in targets if not _is_unchanged(one)] or targets
    target = targets[0]
    if _is_unchanged(target):
        raise Refusal(
            f"{source.reference} is {target.spec.kind} already: a conversion to that size copies it, for any cache",
            hint=f"train it for such a cache with `convert heal --teacher MODEL --cache-dtype {target.cache_dtype}`, or give a "
            "smaller size",
        )
    for one in targets:
        if engine:
            require_stored(engine, one.cache_dtype, engine.stores(host, one.spec))
    if engine:
        _check_engine(engine, host, family, target.spec, source.config)
    if engine and (note := engine.note(before)):
        target = replace(target, notes=(*target.notes, note))
    check_output(output.path, source.directory, output.overwrite, output.resume)
    if host.portable:
        calibration = portable_calibration(method, calibration)
    without = [name for name in methods.LATENT if methods.load_latent(name).text is not TextUse.NEEDED]
    text = calibration_for(source, method, calibration, without)
    if size.per_layer_ranks and text is None:
        raise Refusal("--per-layer-ranks needs calibration text, by which it chooses", hint="leave out --no-text")
    traits = family.traits(source.config).behind_projections
    remarks = list(text_notes(method, text, traits))
    if target.copies:
        text, remarks = None, ["the calibration text is not used"] if text else []
    elif targets[1:] and text is None:
        raise Refusal(
            "--cache-dtype auto needs calibration text, by which it chooses", hint="leave out --no-text, or name a format"
        )
    elif text is not None and not method.folds and size.kv_lora_rank is None and not (engine and engine.latents):
        splits = tuple(
            _target(source, family, method, host, before, split, dtype)
            for start in targets
            for split in _splits(source, family, before, start, size, host, dtype)
        )
        splits = tuple(split for split in splits if not _is_unchanged(split))
        note = "the search starts from this split of the cache; the text decides the split, one for all layers"
        if targets[1:]:
            note = f"the text decides the format, among {_listed(targets, dtype)}, and then the split of the cache"
        if target.spec.qk_rope_head_dim or targets[1:]:
            target = replace(target, splits=splits, notes=(*target.notes, note))
    require_room_to_write(source, text, compute_device(device))
    text = with_default_healing(source, text, compute_device(device))
    return Plan(source, family, target, text, output, device, seed, tuple(remarks))


def _is_unchanged(target: LatentTarget) -> bool:
    """Whether a latent for a format has the source's own size, so that nothing is made for it."""
    return target.copies and rounding_of(target.cache_dtype) is not None


def _check_engine(engine: Engine, host: Host, family: Family, spec: AttentionSpec, config: Any) -> None:
    """Refuse what the engine does not run."""
    objection = engine.objection(host, family, spec, config)
    if objection is None:
        return
    hint = "give another --kv-lora-rank, or --kv-budget, which finds one"
    if engine.query_latent(spec) is not bool(spec.q_lora_rank):
        hint = f"leave out --q-lora-rank: --engine {engine.name} adds a latent of queries where one is needed"
    raise Refusal(objection, hint=hint)


def _target(
    source: Source,
    family: Family,
    method: LatentMethod,
    host: Host,
    before: AttentionSpec,
    size: LatentRequest,
    dtype: str,
) -> LatentTarget:
    """The target of a size that has both numbers."""
    from convert.planning.targets import LatentTarget

    rank, rope_dim = size.kv_lora_rank or 0, size.qk_rope_head_dim or 0
    _check_rotary(source, family, rope_dim)
    spec = replace(before.latent(rank, rope_dim), q_lora_rank=_query_rank(source, host, size.q_lora_rank))
    if size.per_layer_ranks:
        spec = replace(spec, layer_ranks=(rank,) * before.num_layers)
    if rope_dim > (most := most_rotary_dims(source, family, before, host)):
        why = f"of each key's {before.head_dim} dims only {rotary_dim(family, source)} have RoPE, which makes {most}"
        if host.portable:
            why = f"a portable result keeps each of its {most // 2} frequencies once, which makes at most {most}"
        raise Refusal(f"cannot keep {rope_dim} rotary dims of {source.reference}: {why}")
    full = full_rank(source, family, rope_dim)
    channels = rank - host.reserved(rank)
    if channels < 1:
        raise Refusal(f"a latent of rank {rank} holds nothing: {host.name} needs {host.reserved(rank)} channel(s) for itself")
    if channels > full and not size.pad_rank and spec != before:
        whole = with_reserved(host, full)
        added = f"{whole - full} {'more channel' if host.portable else 'constant channel(s)'} of {host.name}"
        raise Refusal(
            f"rank {rank} exceeds full size: at {rope_dim} rotary dims, keys and values of {source.reference} have {full} "
            f"dims, which with {added} makes {whole}",
            hint=f"use --kv-lora-rank {whole}, or --pad-rank for channels of zeros",
        )
    rotary = rotary_dim(family, source)
    if host.portable and method.folds and rotary % rope_dim:
        raise Refusal(
            f"method {method.name} spreads {rope_dim} rotary dims evenly over {rotary}, which is not a geometric ladder of "
            "frequencies, as a portable result needs",
            hint=f"give a --qk-rope-head-dim that divides {rotary}",
        )
    fold = _freqfold(method, size.freqfold, rope_dim, rotary)
    used = min(channels, full)
    form = size.cache_dtype or dtype
    ranks = layer_ranks(rank, full, format_named(form).multiple) if size.per_layer_ranks else ()
    (spec if not ranks else replace(spec, layer_ranks=ranks)).bytes_per_token(form)  # refuses what the format does not take
    target = LatentTarget(before, spec, method, host, used, fold, size.pad_rank, ranks, cache_dtype=size.cache_dtype)
    if target.copies:
        how = "is what the source has: every tensor is copied bit for bit, unchanged"
        return replace(
            target, notes=(f"{spec.kind} {how}" if dtype == source.dtype else f"{spec.kind} is what the source has",)
        )
    of_queries = host.notes(source.config) if spec.q_lora_rank is None else _query_notes(source, family, host, spec)
    notes = [_channels_note(rank, used, host), *of_queries]
    if ranks:
        notes = [f"the text chooses the rank of each layer, {ranks[0]} to {ranks[-1]}, and {rank} on average"]
    if fold > 1:
        notes.append(f"inexact at any rank: {fold} neighbouring frequencies are taken for one")
    if odd := [each for each in ranks or (rank,) if each % RANK_STEP]:
        which = f"rank {rank} is not a multiple" if odd == [rank] else "some of these ranks are not multiples"
        notes.append(f"{which} of {RANK_STEP}: on NVIDIA GPUs plain torch decodes such layers, not kvfold's kernel")
    if spec.bytes_per_token(form) >= before.bytes_per_token(source.dtype):
        notes.append("the cache is not smaller than the source's")
    return replace(target, notes=tuple(notes))


def _check_rotary(source: Source, family: Family, rope_dim: int) -> None:
    """Refuse a RoPE key where nothing rotates, and none where something does."""
    rotates = rotary_dim(family, source) > 0
    if rope_dim and not rotates:
        raise Refusal(
            f"{source.reference} has no RoPE, so it has no RoPE key of {rope_dim} dims: all of its keys go into the latent",
            hint="leave out --qk-rope-head-dim",
        )
    if rotates and rope_dim < 2:
        raise Refusal(
            f"cannot keep {rope_dim} rotary dims of {source.reference}: where keys rotate, a RoPE key needs at least 2",
            hint="give --qk-rope-head-dim 2 or more",
        )


def _whole(
    source: Source,
    family: Family,
    before: AttentionSpec,
    size: LatentRequest,
    host: Host,
    dtype: str,
    engine: Engine | None,
) -> list[LatentRequest]:
    """The request with both numbers; for `--cache-dtype auto`, one for each format of which the budget holds any."""
    if size.cache_dtype != AUTO:
        rank, rope_dim = _latent_size(source, family, before, size, host, size.cache_dtype or dtype, engine)
        return [replace(size, kv_lora_rank=rank, qk_rope_head_dim=rope_dim)]
    if size.kv_share is None and size.kv_bytes is None:
        raise Refusal(
            "--cache-dtype auto chooses the format of a budget", hint="give --kv-budget, or name a format with --cache-dtype"
        )
    found, refusals = [], []
    stored = _TRIED if engine is None else [cache.form for cache in engine.caches if cache.tried]
    for form in (None, *stored):
        try:
            found += _whole(source, family, before, replace(size, cache_dtype=form), host, dtype, engine)
        except Refusal as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[-1]
    return found


def _latent_size(
    source: Source,
    family: Family,
    before: AttentionSpec,
    size: LatentRequest,
    host: Host,
    form: str,
    engine: Engine | None,
) -> tuple[int, int]:
    """R and P, as given or of a budget for a cache in that format."""
    given = (size.kv_lora_rank, size.qk_rope_head_dim)
    rotates = rotary_dim(family, source) > 0
    if size.kv_share is None and size.kv_bytes is None:
        if size.kv_lora_rank is None or (rotates and size.qk_rope_head_dim is None):
            raise Refusal(f"give --kv-lora-rank{' and --qk-rope-head-dim' if rotates else ''}, or --kv-budget")
        return size.kv_lora_rank, size.qk_rope_head_dim or 0
    if given != (None, None):
        raise Refusal("give either --kv-budget or --kv-lora-rank and --qk-rope-head-dim, not both")
    if size.pad_rank:
        raise Refusal(
            "give either --kv-budget or --pad-rank: a budget never goes beyond full size, where there is nothing to pad",
            hint="for channels of zeros give --kv-lora-rank and --qk-rope-head-dim",
        )
    share, whole = size.kv_share or 0.0, before.bytes_per_token(source.dtype)
    budget = int(share * whole) if size.kv_bytes is None else size.kv_bytes
    if budget > whole:
        raise Refusal(f"a budget of {budget} bytes per token exceeds the {whole} of {source.reference}: nothing to save")
    values = budget * 8 // (before.num_layers * format_named(form).bits)
    if engine and engine.latents:
        return engine.fitting(values)
    step, most = format_named(form).multiple, most_rotary_dims(source, family, before, host)
    smallest = before.latent(-(-with_reserved(host, 1) // step) * step, min(most, max(2, step)) if rotates else 0)
    least = smallest.bytes_per_token(form)  # refuses a model whose rotary dims are too few for the format
    try:
        while True:
            rank, rope_dim = latent_for_budget(source, family, before, host, values)
            if found := _within(before, rank, rope_dim, most, budget, form):
                return found
            values -= 1
    except Refusal as error:
        raise Refusal(
            f"a budget of {budget} bytes per token is too small for any rank: {error}",
            hint=f"the least is {least} bytes per token in {form}, and little is left of a model there",
        ) from None


def _within(before: AttentionSpec, rank: int, rope_dim: int, most: int, budget: int, form: str) -> tuple[int, int] | None:
    """R and P of as many numbers or less that the format takes, if their cache keeps to a budget of bytes per token.

    P is rounded up, as far as `most`.
    """
    step = format_named(form).multiple
    kept = -(-rope_dim // step) * step
    kept = kept if kept <= most else rope_dim // step * step
    rank = (rank + rope_dim - kept) // step * step
    if rank < 1 or (rope_dim and not kept):
        return None
    return (rank, kept) if before.latent(rank, kept).bytes_per_token(form) <= budget else None


def _listed(targets: list[LatentTarget], dtype: str) -> str:
    named = [f"{target.cache_dtype or dtype} at {target.spec.kind}" for target in targets]
    return f"{', '.join(named[:-1])} and {named[-1]}"


def _splits(
    source: Source,
    family: Family,
    before: AttentionSpec,
    start: LatentTarget,
    size: LatentRequest,
    host: Host,
    dtype: str,
) -> list[LatentRequest]:
    """The target and its alternatives: as many bytes or a few less, with a quarter of to twice its rotary dims."""
    target, form = replace(start.spec, layer_ranks=None), start.cache_dtype or dtype
    values, kept = (target.kv_lora_rank or 0) + target.qk_rope_head_dim, target.qk_rope_head_dim
    found: list[tuple[int, int]] = []
    budget, step = target.bytes_per_token(form), format_named(form).multiple
    for rope_dim in sorted({kept * eighths // 16 * 2 for eighths in (2, 4, 6, 8, 12, 16)} | {kept}):
        rank, full = values - rope_dim, full_rank(source, family, rope_dim)
        channels = rank - host.reserved(rank) if rank > 0 else 0
        most = most_rotary_dims(source, family, before, host)
        if rope_dim % step == 0 and 2 <= rope_dim <= most and 1 <= channels <= full:
            # Groups of values that share a scale are filled differently by another split.
            served = (served_rank(most_rank, with_reserved(host, full), values) for most_rank in range(rank, 0, -1))
            fitting = (_within(before, one, rope_dim, most, budget, form) for one in served)
            found += next(([split] for split in fitting if split), [])
    found = found or [(target.kv_lora_rank or 0, target.qk_rope_head_dim)]
    request = replace(size, pad_rank=False, cache_dtype=start.cache_dtype)
    return [replace(request, kv_lora_rank=rank, qk_rope_head_dim=rope_dim) for rank, rope_dim in found]


def _freqfold(method: LatentMethod, fold: int | None, rope_dim: int, rotary_dim: int) -> int:
    if not method.folds:
        if fold is not None:
            raise Refusal(f"method {method.name} does not fold frequencies", hint="leave out --freqfold, or use --method pca")
        return 1
    if not rotary_dim:
        if fold is not None:
            raise Refusal("there are no frequencies to fold: the source has no RoPE", hint="leave out --freqfold")
        return 1
    chosen = default_fold(rope_dim, rotary_dim) if fold is None else fold
    check_fold(chosen, rope_dim, rotary_dim)
    return chosen


def _query_rank(source: Source, host: Host, rank: int | None) -> int | None:
    """The rank of a latent of queries as asked for, if the output class can have it."""
    if rank is None:
        return None
    full = host.full_query_rank(source.decoder.hidden_size)
    if full is None:
        raise Refusal(
            f"the result of {source.reference} is a {host.name}, which has no latent of queries, so it has no --q-lora-rank",
            hint="leave out --q-lora-rank",
        )
    if host.portable and rank != full:
        raise Refusal(
            f"--q-lora-rank is {rank}, and a portable result of {source.reference} has queries of full rank: {full}",
            hint="leave it out: --engine llama.cpp adds a latent of queries where one is needed",
        )
    if not _FEWEST_QUERY_CHANNELS <= rank <= full:
        raise Refusal(
            f"--q-lora-rank is {rank}, and for {source.reference} it must be from {_FEWEST_QUERY_CHANNELS} to {full}, which "
            "holds the whole input and constants",
            hint="leave it out for queries that lose nothing",
        )
    return rank


def _query_notes(source: Source, family: Family, host: Host, spec: AttentionSpec) -> tuple[str, ...]:
    """The cost and the gain of a latent of queries."""
    config, layout = source.config, host.layout(family)

    def weights(of: Family, sized: Any) -> int:
        return sum(math.prod(shape) for shape in of.shapes(sized, 0).values())

    plain, found = (host.sized(source.raw, config, size) for size in (replace(spec, q_lora_rank=None), spec))
    counts = weights(layout, found), weights(family, config), weights(layout, plain)
    saved = (
        "the attention of a layer has {:,} parameters; the source's has {:,}, and without a latent of queries it would "
        "have {:,}".format(*counts)
    )
    if spec.q_lora_rank == host.full_query_rank(config.hidden_size):
        return (saved,)
    return (
        saved,
        "a smaller MLA of the result would have kvfold's class, behind the norms of both latents",
    )


def _channels_note(rank: int, used: int, host: Host) -> str:
    constant = host.reserved(rank)
    zeros = rank - used - constant
    note = f"{used} of {rank} latent channels carry keys and values"
    if host.portable:
        note += "; one makes the norm of latents nearly constant"
    elif constant:
        note += f"; {constant} {'holds a constant' if constant == 1 else 'hold constants'} for the norm of {host.name}"
    return note + (f"; {zeros} are zero, as --pad-rank allows" if zeros else "")
