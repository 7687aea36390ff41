"""The texts and tables of `inspect`, `plan` and `families`. Reads configs, never weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from attention.errors import Refusal
from attention.formats import SERVED, format_named
from attention.spec import AttentionSpec
from convert.families import FAMILIES, UNREAD
from convert.families.reading import FOUND, INSIDE
from convert.hosts import HOSTS
from convert.hosts.engines import running, storing
from convert.methods.text import ASSUMED_CONTEXT
from convert.planning.allowed import held_by, readable, staying
from convert.planning.budget import LatentBounds, rule_text, smallest_latent
from eval.terminal.text import bytes_text, table

if TYPE_CHECKING:
    from convert.families import Family
    from convert.hosts import Host
    from convert.hosts.engines import Engine
    from eval.inputs.source import Source

_LIMITED = (
    "MLA that gives up rotary dims is made for all positions where these can skip, else for those of a block; without text, "
    f"for {ASSUMED_CONTEXT}."
)


class Facts(dict[str, Any]):
    """Facts as a dict with plain numbers, for programs; `str(facts)` is the text for people."""

    def __init__(self, facts: Mapping[str, Any], text: str) -> None:
        super().__init__(facts)
        self._text = text

    def __str__(self) -> str:
        return self._text


def inspection(source: Source) -> Facts:
    """Heads, RoPE, biases, family, output classes and cache of a checkpoint, from its config."""
    family = readable(source)
    spec, context, carriers = family.spec, source.longest_context, {kind: _carrier(family, kind) for kind in HOSTS}
    host, kept_in = carriers["mla"].host, {kind: sorted(carrier.kept) for kind, carrier in carriers.items()}
    facts = {
        "model": source.reference,
        **_origin(source),
        "family": family.model_type,
        "layout": family.layout,
        "attention": spec.kind,
        "layers": spec.num_layers,
        "query_heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads if spec.kv_lora_rank is None else None,
        "head_dim": spec.head_dim,
        **({"kept_layers": list(spec.kept)} if spec.kept else {}),
        **({} if spec.kv_lora_rank is None else {"kv_lora_rank": spec.kv_lora_rank, "qk_nope_head_dim": spec.qk_nope_head_dim}),
        "max_positions": source.max_positions,
        **family.describe(),
        "cache_dtype": source.dtype,
        "kv_bytes_per_token": spec.bytes_per_token(source.dtype, context),
        **({"kv_context": context} if spec.is_cut(context) else {}),
        "groups_possible": [target.num_kv_heads for target in grouped_targets(spec)],
        "latents_possible": [target.kind for target in latent_targets(source, family, host, kept_in["mla"])] if host else [],
        **({"layers_that_stay": kept_in} if any(kept_in.values()) else {}),
        "output_classes": {
            kind: f"{carrier.name}, loads in {carrier.loads_in}" if carrier else f"none ({refusal})"
            for kind, (carrier, _, refusal) in carriers.items()
        },
        **_noted(source, spec, context),
    }
    return Facts(facts, _inspection_text(facts))


def _noted(source: Source, spec: AttentionSpec, context: int) -> dict[str, Any]:
    """What a conversion will say that reads more than the config, what windows keep out of the cache, and a remark on the code
    beside weights that are here.
    """
    windows = spec.window_note(context)
    notes = [*([windows] if windows else ()), *source.notes]
    if source.directory and source.code_note:
        notes.append(source.code_note)
    try:
        if source.directory:
            source.refuse_stale_quantisation()
        if source.quantisation:
            kind, _ = source.quantisation
            notes.append(f"it is quantised ({kind}), which a conversion refuses; all figures are of the model before that")
    except Refusal as stale:
        notes.append(f"{stale}: {stale.hint}")
    if source.calibrated:
        notes.append(f"it is {source.calibrated}")
    return {"notes": notes} if notes else {}


def _origin(source: Source) -> dict[str, Any]:
    """How a conversion made it, as its conversion.json says; nothing of other models."""
    from convert.output.destination import read_provenance  # takes torch

    made = read_provenance(source.directory) if source.directory else {}
    if "kvfold" not in made or not isinstance(made.get("source"), dict):
        return {}
    positions = source.calibrated.positions if source.calibrated else source.max_positions
    return {
        "converted_from": str(made["source"].get("model")),
        "method": None if made.get("method") is None else str(made["method"]),
        "calibrated_positions": positions,
    }


class _Carrier(NamedTuple):
    """The output class of a kind of target, and the layers that stay as they are; or None, and the reason."""

    host: Host | None
    kept: Collection[int] = ()
    refusal: str = ""


def _carrier(family: Family, kind: str, engine: Engine | None = None) -> _Carrier:
    if family.needs_code:
        return _Carrier(None, refusal="results in kvfold's class are not converted again")
    try:
        kept = staying(family)
        target = smallest_latent(family, kept.layers) if kind == "mla" else family.spec.grouped(1)
        host, made = held_by(HOSTS[kind], family, target, kept, engine)
        return _Carrier(host, made.kept)
    except Refusal as error:
        return _Carrier(None, refusal=str(error))


def _inspection_text(facts: Mapping[str, Any]) -> str:
    rows = []
    for key, value in facts.items():
        if isinstance(value, dict):
            value = "; ".join(f"{k}: {v}" for k, v in value.items()) or "nothing"
        elif isinstance(value, list):
            others = ", and others" if key == "latents_possible" and value else ""
            value = ", ".join(map(str, value)) + others or "none"
        elif value is None or value is False:
            value = "no" if value is False else "none"
        rows.append((key.replace("_", " "), "yes" if value is True else str(value)))
    return table(("", "value"), rows)


def grouped_targets(spec: AttentionSpec) -> list[AttentionSpec]:
    """The source itself, then every smaller number of KV heads that it can have; none for a latent, which has no KV heads."""
    heads = spec.num_kv_heads if spec.kv_lora_rank is None else 0
    return [spec.grouped(groups) for groups in range(heads, 0, -1) if heads % groups == 0]


def capacity(
    source: Source,
    dtype: str,
    batch: int,
    context: int,
    gpus: Mapping[str, float],
    engine: Engine | None = None,
    cache_dtype: str | None = None,
) -> Facts:
    """Memory of the source and of each possible target, and the GPUs that it fits on.

    Args:
        source: The model.
        dtype: The dtype of weights.
        batch: Sequences at once.
        context: Tokens per sequence.
        gpus: Gigabytes by name.
        engine: What has to run the targets; None for nothing in particular.
        cache_dtype: The format of the cache; None for `dtype`.
    """
    from eval.machine.capacity import GPU_SHARE, count_parameters, fit

    family = readable(source)
    spec = family.spec
    whole, own = count_parameters(source.config), _parameters(family.shapes, spec)
    rows = []
    hosts = {kind: _carrier(family, kind, engine) for kind in HOSTS}
    targets = [("gqa", target) for target in grouped_targets(spec)] or [("mla", spec)]
    kept_in_heads = hosts["gqa"].kept
    targets = [
        (kind, target if target == spec else target.keeping(kept_in_heads, spec.num_kv_heads)) for kind, target in targets
    ]
    if host := hosts["mla"].host:
        sizes = latent_targets(source, family, host, hosts["mla"].kept, engine)
        targets += [("mla", target) for target in sizes if target.takes(cache_dtype or dtype)]
    if format_named(cache_dtype or dtype).classes:  # of latents
        targets = [(kind, target) for kind, target in targets if target.kv_lora_rank] or targets
    for kind, target in targets:
        shapes, engines, carrier = family.shapes, None, hosts[kind].host
        if target != spec:
            if carrier is None:
                continue
            made = carrier, family, target
            shapes = carrier.layout(family).of(carrier.sized(source.raw, family, target)).shapes
            engines = running(*made) if cache_dtype in (None, dtype) else storing(*made, cache_dtype)
        parameters = whole - own + _parameters(shapes, spec)
        row = fit(target, parameters, dtype, batch, context, gpus, cache_dtype)
        rows.append(row | {"parameters": parameters, "engines": engines})
    facts = {
        "model": source.reference,
        "dtype": dtype,
        "cache_dtype": cache_dtype or dtype,
        "batch": batch,
        "context": context,
        "max_positions": source.max_positions,
        "gpu_gigabytes": dict(gpus),
        "gpu_share": GPU_SHARE,
        "targets": rows,
        "mla": None if host else f"none: {hosts['mla'].refusal}",
        **_noted(source, spec, context),
    }
    return Facts(facts, _capacity_text(facts))


def latent_targets(
    source: Source, family: Family, host: Host, kept: Collection[int], engine: Engine | None = None
) -> list[AttentionSpec]:
    """Sizes for some shares of the cache of layers that change, as `--kv-budget` splits them, and the one that every MLA kernel
    supports.

    Of an engine that takes some sizes only, those that are smaller than the source's cache.
    """
    spec = family.spec
    if engine and engine.latents:
        fitting = []
        for size in reversed(engine.latents):
            with suppress(Refusal):  # the source has fewer rotary dims
                fitting.append(spec.latent(*size))
        return [target for target in fitting if target.values_per_token < spec.values_per_token]
    found, bounds = [], LatentBounds(source, family, host, tuple(kept))
    for share in (0.5, 0.25, 0.125):
        with suppress(Refusal):  # too small for a tiny model
            values = int(share * spec.values_per_token) // spec.num_layers
            found.append(spec.latent(*bounds.for_budget(values)))
    rank, rope = 512, 64
    with suppress(Refusal):
        if rank <= bounds.full_rank(rope) and (rank + rope) * spec.num_layers < spec.values_per_token:
            found.append(spec.latent(rank, rope))
    found = [target.keeping(kept, spec.num_kv_heads) for target in found]
    return sorted(set(found), key=lambda target: -target.values_per_token)


def _parameters(shapes: Callable[[int], dict[str, tuple[int, ...]]], spec: AttentionSpec) -> int:
    return sum(math.prod(shape) for layer in range(spec.num_layers) for shape in shapes(layer).values())


def _capacity_text(facts: Mapping[str, Any]) -> str:
    """A table with one row per target; the source comes first."""
    gpus, limit = facts["gpu_gigabytes"], facts["max_positions"]
    header = ["attention", "KV per token", "KV cache", "weights", *(f"{name} {size:g} GB" for name, size in gpus.items())]
    within = f" of the {limit} positions that the model is made for" if limit else ""
    if limit and facts["context"] > limit:
        within = f": MORE THAN THE {limit} POSITIONS that the model is made for"
    form = facts["cache_dtype"]
    whose = f"of {SERVED[form].engine} (--kv-cache-dtype {form}, not tried)" if form in SERVED else f"in {form}"
    cache = "" if form == facts["dtype"] else f" with a cache {whose}"
    rows = []
    for row in facts["targets"]:
        cells = [row["kind"] + (" (source)" if row["engines"] is None else "")]
        cells += [bytes_text(row[key]) for key in ("kv_bytes_per_token", "kv_bytes", "weight_bytes")]
        cells += [_fit_cell(row["fits"][name], row["longest_context"][name], limit) for name in gpus]
        rows.append([*cells, "" if row["engines"] is None else ", ".join(row["engines"])])
    reach = ", at most the positions that the model is made for." if limit else "."
    parts = [
        f"{facts['model']} in {facts['dtype']}{cache}, batch {facts['batch']}, context {facts['context']}{within}",
        table([*header, "engines"], rows, right=range(1, len(header))),
        f"MLA: {facts['mla']}" if facts["mla"] else rule_text(),
        *([_LIMITED] if limit and limit > ASSUMED_CONTEXT and not facts["mla"] else []),
        *facts.get("notes", ()),
        f"kB, MB, GB = 10³, 10⁶, 10⁹ bytes. A GPU column says whether weights and cache take at most {facts['gpu_share']:.0%} "
        f"of its memory\nat this context, and the longest context for which they do at this batch{reach}",
    ]
    return "\n\n".join(parts)


def _fit_cell(fits: bool, longest: int, limit: int | None) -> str:
    if longest == 0:
        return "no"
    reach = f"its limit, {limit}" if limit and longest > limit else str(longest)
    return f"{'yes' if fits else 'no'}, to {reach}"


def support() -> list[dict[str, Any]]:
    """One row per family that is converted: the output class of each kind of target, for configs that the class accepts.

    Where there is none, whatever the config, `refused` says why.
    """
    rows: list[dict[str, Any]] = []
    for name, family in sorted((name, family) for name, family in FAMILIES.items() if family.has_heads):
        carriers = {kind: [host.name for host in hosts if name in host.families] for kind, hosts in HOSTS.items()}
        refused = {kind: family.without_latent for kind, hosts in carriers.items() if not hosts}
        cells = {kind: ", ".join(hosts) or "-" for kind, hosts in carriers.items()}
        rows.append({"family": name, "layout": family.layout, **cells, "refused": refused})
    return rows


def support_text(rows: list[dict[str, Any]]) -> str:
    """The rows as a table for a terminal, what each output class loads in, and why others have none."""
    hosts = {host.name: host for hosts in HOSTS.values() for host in hosts}
    header = ["family", "layout", *HOSTS]
    return "\n\n".join(
        (
            table(header, [[row[key] for key in header] for row in rows]),
            "\n".join(f"{name}: loads in {host.loads_in}; {host.served_by}" for name, host in hosts.items()),
            "\n".join(refusals(rows)),
        )
    )


def refusals(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each target without an output class and each type that is not read on purpose, and what else is read."""
    targets = [f"{row['family']} to {kind.upper()}: {why}" for row in rows for kind, why in row["refused"].items()]
    return [
        *targets,
        *(f"{name} is not read: {why}" for name, why in sorted(UNREAD.items())),
        f"read by experiments, without a row of this table, and others like them: {', '.join(FOUND)}",
        f"read by experiments, decoders inside models that see, and others like them: {', '.join(INSIDE)}",
    ]
