"""What `inspect`, `plan`, `families` and dry runs say. Configs are read; weights never are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from attention.errors import Refusal
from attention.spec import AttentionSpec
from convert.families import FAMILIES, Family
from convert.hosts import HOSTS, Host
from convert.planning.base import Plan, host_of, readable
from convert.planning.calibration import Calibration
from convert.planning.latent import full_rank, latent_for_budget
from eval.capacity import count_parameters, fit, with_kv_heads
from eval.source import Source
from eval.tables import table


def inspection(source: Source) -> dict[str, Any]:
    """Heads, rotary, biases, family, hosts and cache of a checkpoint, from its config."""
    family = readable(source)
    spec = family.spec(source.config)
    host, _ = _carrier(source, family, spec, "mla", source.dtype)
    return {
        "model": source.reference,
        "family": family.model_type,
        "layout": family.layout,
        "attention": spec.kind,
        "layers": spec.num_layers,
        "query_heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_positions": source.max_positions,
        **family.describe(source.config),
        "cache_dtype": source.dtype,
        "kv_bytes_per_token": spec.bytes_per_token(source.dtype),
        "groups_possible": [target.num_kv_heads for target in targets(spec)],
        "latents_possible": [target.kind for target in latent_targets(source, spec, host)] if host else [],
        "hosts": {kind: _host(source, family, spec, kind) for kind in HOSTS},
    }


def _host(source: Source, family: Family, spec: AttentionSpec, kind: str) -> str:
    host, remark = _carrier(source, family, spec, kind, source.dtype)
    return f"{host.name}, loads in {host.loads_in}{f' ({remark})' if remark else ''}" if host else f"none ({remark})"


def _carrier(source: Source, family: Family, spec: AttentionSpec, kind: str, dtype: str) -> tuple[Host | None, str | None]:
    """The host of a kind of target, with a remark if it wants another dtype; or None and why."""
    target = spec.latent(1, 2) if kind == "mla" else spec.grouped(1)
    try:
        return host_of(kind, family, source, target, dtype), None
    except Refusal as error:
        with suppress(Refusal):
            return host_of(kind, family, source, target, "bfloat16"), "only with --dtype bfloat16"
        return None, str(error)


def inspection_text(facts: Mapping[str, Any]) -> str:
    """The same for a terminal."""
    rows = []
    for key, value in facts.items():
        if isinstance(value, dict):
            value = "; ".join(f"{k}: {v}" for k, v in value.items()) or "nothing"
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) + (", and others" if key == "latents_possible" and value else "")
        elif value is None or value is False:
            value = "no" if value is False else "none"
        rows.append((key.replace("_", " "), "yes" if value is True else str(value)))
    return table(("", "value"), rows)


def targets(spec: AttentionSpec) -> list[AttentionSpec]:
    """The source itself, then every smaller number of KV heads it can be given."""
    heads = spec.num_kv_heads
    return [spec.grouped(groups) for groups in range(heads, 0, -1) if heads % groups == 0]


def capacity(source: Source, dtype: str, batch: int, context: int, gpus: Mapping[str, float], share: float) -> dict[str, Any]:
    """What the source and each possible target take, and where that fits."""
    family = readable(source)
    config, spec = source.config, family.spec(source.config)
    whole, own = count_parameters(config, source.trust_remote_code), _parameters(partial(family.shapes, config), spec)
    rows = []

    def add(target: AttentionSpec, shapes: Callable[[int], dict[str, tuple[int, ...]]]) -> None:
        parameters = whole - own + _parameters(shapes, spec)
        rows.append(asdict(fit(target, parameters, dtype, batch, context, gpus, share)) | {"parameters": parameters})

    for target in targets(spec):
        add(target, partial(family.shapes, with_kv_heads(config, target)))
    host, remark = _carrier(source, family, spec, "mla", dtype)
    if host:
        for target in latent_targets(source, spec, host):
            add(target, partial(host.shapes, family, config, target))
    return {
        "model": source.reference,
        "dtype": dtype,
        "batch": batch,
        "context": context,
        "max_positions": source.max_positions,
        "gpu_gigabytes": dict(gpus),
        "gpu_share": share,
        "targets": rows,
        "mla": f"{'' if host else 'none: '}{remark}" if remark else None,
    }


def latent_targets(source: Source, spec: AttentionSpec, host: Host) -> list[AttentionSpec]:
    """What `--kv-budget` makes of some shares of the source's cache, and the one size that every MLA kernel knows."""
    found = []
    for share in (0.5, 0.25, 0.125):
        with suppress(Refusal):  # of a tiny model too little is left
            sizes = latent_for_budget(source, spec, host, int(share * spec.values_per_token) // spec.num_layers)
            found.append(spec.latent(*sizes))
    rank, rope = 512, 64
    if rank <= full_rank(source, spec, rope) and (rank + rope) * spec.num_layers < spec.values_per_token:
        found.append(spec.latent(rank, rope))
    return sorted(set(found), key=lambda target: -target.values_per_token)


def _parameters(shapes: Callable[[int], dict[str, tuple[int, ...]]], spec: AttentionSpec) -> int:
    return sum(math.prod(shape) for layer in range(spec.num_layers) for shape in shapes(layer).values())


def capacity_text(facts: Mapping[str, Any]) -> str:
    """The same for a terminal: one row per target, the first the source."""
    gpus = facts["gpu_gigabytes"]
    header = [
        "attention",
        "KV bytes/token",
        "KV cache GB",
        "weights GB",
        *(f"{name} {size:g} GB" for name, size in gpus.items()),
    ]
    rows = []
    for i, row in enumerate(facts["targets"]):
        cells = [row["kind"] + (" (source)" if i == 0 else ""), str(row["kv_bytes_per_token"])]
        cells += [f"{row['kv_bytes'] / 1e9:.1f}", f"{row['weight_bytes'] / 1e9:.1f}"]
        rows.append(cells + [_fit_cell(row["fits"][name], row["longest_context"][name]) for name in gpus])
    limit = f", the model is made for {facts['max_positions']} positions" if facts["max_positions"] else ""
    return (
        f"{facts['model']} in {facts['dtype']}, batch {facts['batch']}, context {facts['context']}{limit}\n\n"
        + table(header, rows, right=range(1, len(header)))
        + (f"\n\nMLA: {facts['mla']}" if facts["mla"] else "")
        + f"\n\nGB = 10⁹ bytes. A GPU column says whether weights and cache take at most {facts['gpu_share']:.0%} of its memory"
        f" at this context, and the longest context for which they do at this batch."
    )


def _fit_cell(fits: bool, longest: int) -> str:
    if longest == 0:
        return "no"
    return f"{'yes' if fits else 'no'}, to {longest}"


def support() -> list[dict[str, str]]:
    """One row per family: the host of each kind of target, given a config that it accepts."""
    return [
        {
            "family": name,
            "layout": family.layout,
            **{
                kind: ", ".join(host.name for host in hosts if host.families is None or name in host.families) or "-"
                for kind, hosts in HOSTS.items()
            },
        }
        for name, family in sorted(FAMILIES.items())
    ]


def support_text(rows: list[dict[str, str]]) -> str:
    """The same for a terminal."""
    return table(list(rows[0]), [list(row.values()) for row in rows])


def plan_text(plan: Plan, done: bool) -> str:
    """A conversion for a terminal: what was done, or with `--dry-run` what would be."""
    facts = plan.as_dict()
    before, after = facts["kv_bytes_per_token_before"], facts["kv_bytes_per_token_after"]
    kept = facts["cache_dtype"] if plan.cache_dtype == plan.source.dtype else f"{plan.cache_dtype}, was {plan.source.dtype}"
    how = f"method {plan.method.name} ({plan.method.summary})" if plan.applied_method else "nothing to merge"
    if plan.calibration:
        text = next(iter(plan.calibration.given.values()))
        how += f", calibrated on at most {plan.calibration.tokens} tokens of {text} in blocks of {plan.calibration.context}"
    where = "written to" if done else "would be written to"
    steps = _steps(plan)
    lines = [
        f"{facts['source']} → {facts['target']}, {how}",
        *([f"with {', '.join(steps)}"] if steps else []),
        f"KV cache: {before} → {after} bytes per token ({after / before:.1%}, kept in {kept})",
        *facts["notes"],
        f"{where} {facts['output']}, loads in {facts['loads_in']} as {facts['model_type']}",
    ]
    return "\n".join(lines)


def _steps(plan: Plan) -> list[str]:
    """What is done beyond the method, as on the command line."""
    text = plan.calibration or Calibration()
    return [
        *(["--grouping similar"] if plan.grouping == "similar" and plan.applied_method else []),
        *(["--propagate"] if text.propagate else []),
        *(["--refit"] if text.refit else []),
        *([f"--refine {text.refine}"] if text.refine else []),
    ]


def plans_text(plans: Sequence[Plan]) -> str:
    """What a sweep would make, one row per result."""
    rows = []
    for plan in plans:
        before, after = plan.before.bytes_per_token(plan.source.dtype), plan.target.bytes_per_token(plan.cache_dtype)
        rows.append([plan.output.path.name, plan.target.kind, plan.method.name, str(after), f"{after / before:.1%}"])
    where = f"would be written to {plans[0].output.path.parent}, with a report"
    return table(["result", "attention", "method", "KV bytes/token", "of the source's"], rows, right=(3, 4)) + f"\n\n{where}"
