"""Describe a conversion: to its caller, in conversion.json and in README.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from attention.calibrated import Calibrated
from attention.spec import AttentionSpec
from convert.execute.job import Job
from convert.execute.manifest import Manifest
from convert.families import Family
from convert.hosts import Host
from convert.hosts.engines import ENGINES
from convert.output.card import command_line, metadata_of, render
from convert.output.destination import versions
from convert.planning.base import Plan
from convert.planning.texts import as_options, names_of
from eval.inputs.text import WARN_ABOVE
from eval.report.quality import loss_text
from eval.terminal.text import markdown


@dataclass(frozen=True)
class PlannedConversion:
    """A conversion that a dry run has planned.

    Attributes:
        plan: The plan.
    """

    plan: Plan

    @property
    def output(self) -> Path:
        """The checkpoint's directory."""
        return self.plan.output.path

    @property
    def before(self) -> AttentionSpec:
        """The source's attention."""
        return self.plan.before

    @property
    def after(self) -> AttentionSpec:
        """The result's attention."""
        return self.plan.target.spec

    def as_dict(self) -> dict[str, Any]:
        """The plan's facts."""
        return self.plan.as_dict()

    def __str__(self) -> str:
        lines = [*_plan_lines(self.plan), str(self.plan.calibrated or ""), f"would be written to {_where(self.plan)}"]
        return "\n".join(filter(None, lines))


@dataclass(frozen=True)
class Conversion(PlannedConversion):
    """A conversion that was done.

    Attributes:
        provenance: The content of conversion.json.
    """

    provenance: dict[str, Any]

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Each layer's errors, as in conversion.json."""
        return list(self.provenance["layers"])

    @property
    def report(self) -> dict[str, Any] | None:
        """The evaluation, if one was asked for: `{"protocol", "models": [source, converted]}`."""
        return self.provenance.get("evaluation")

    def as_dict(self) -> dict[str, Any]:
        """The plan's facts, and the provenance."""
        return super().as_dict() | {"conversion": self.provenance}

    def __str__(self) -> str:
        lines = [*_plan_lines(self.plan), *_measured(self.provenance), f"written to {_where(self.plan)}"]
        return "\n".join(filter(None, [*lines, str(Calibrated.read(self.provenance) or "")]))


def _where(plan: Plan) -> str:
    host = plan.target.host
    return f"{plan.output.path}, loads in {host.loads_in} as {host.layout(plan.family).model_type}"


def _plan_lines(plan: Plan) -> list[str]:
    spec, method, text = plan.target.spec, plan.target.method, plan.calibration
    (before, after), at = plan.kv_bytes_per_token, plan.before.at_context(plan.context)
    kept = plan.cache_dtype if plan.cache_dtype == plan.source.dtype else f"{plan.cache_dtype}, was {plan.source.dtype}"
    how = f"method {method.name} ({method.summary})" if plan.applied_method else "nothing to change"
    if text:
        how += f", calibrated on at most {text.tokens} tokens of {names_of(text.texts)} in blocks of {text.context}"
        how += f" for contexts of {text.max_context}" if text.max_context != text.context else ""
    words = {"cast": f"cast to {plan.output.dtype}", "heal": f"heal the whole on {text.heal if text else 0} tokens"}
    steps = [words.get(step, step) for step in plan.steps]
    return [
        f"{plan.before.kind} → {spec.kind}, {how}",
        *([f"steps: {' → '.join(steps)}"] if steps[1:] or steps != plan.steps else []),  # if that is more than the method
        f"KV cache: {before:.0f} → {after:.0f} bytes per token{at} ({after / before:.1%}, kept in {kept})",
        *plan.notes,
    ]


def _measured(provenance: Mapping[str, Any]) -> list[str]:
    """What the healing, the check and the evaluation say of the result, where there were any."""
    lines = list[str]()
    if healing := provenance.get("healing"):
        before, after, tokens = healing["before"]["kl"], healing["after"]["kl"], healing["held_out_tokens"]
        if provenance["tensors"]["healed"]:
            lines.append(f"healed on {healing['tokens']} tokens: KL {before:.4f} → {after:.4f} on {tokens} others")
        else:
            lines.append(f"healing gained nothing: KL {before:.4f} on {tokens} tokens that were held out")
    if check := provenance.get("check"):
        found = [f"{loss_text(one['loss_nats'], '+.3f')} on {one['tokens']} tokens of {one['text']}" for one in check["texts"]]
        lines.append(f"checked on text that was not fitted: {', '.join(found)}")
    if evaluation := provenance.get("evaluation"):
        source, *others = evaluation["models"]
        lines += [
            f"perplexity: {source['perplexity']:.4g} → {converted['perplexity']:.4g} at {loss_text(converted['loss_nats'])} on "
            f"{converted['tokens']} tokens of {evaluation['protocol']['text']}, KL {converted['kl_to_source']:.4f}, "
            f"top-1 agreement {converted['top1_agreement']:.1%}"
            + (f", with its cache in {form}" if (form := converted.get("cache_format")) else "")
            for converted in others
            if converted["path"] != source["path"]
        ]
    return lines


def provenance_of(job: Job, layers: Sequence[dict[str, Any]], calibrated: Calibrated | None) -> dict[str, Any]:
    """conversion.json without its `run`: the same inputs and seed give the same content.

    Args:
        job: The conversion, whose tensors are written.
        layers: The notes of the converted layers.
        calibrated: For how many positions the result is calibrated, as its config.json says; None for all.
    """
    plan, text, choice, spec = job.plan, job.text, job.choice, job.spec
    before, after = plan.kv_bytes_per_token
    tags = [plan.target.command, *([plan.applied_method] if plan.applied_method else [])]
    return {
        "kvfold": version("kvfold"),
        "source": {"model": plan.source.reference, "revision": plan.source.commit, "kind": plan.before.kind},
        "kind": spec.kind,
        "method": plan.applied_method,
        "recipe": {plan.target.command: plan.recipe},
        "kv_bytes_per_token": {
            "before": before,
            "after": after,
            "cache_dtype": plan.cache_dtype,
            **({"context": plan.context} if plan.before.is_cut(plan.context) else {}),
        },
        "calibration_hash": text.tokens.hash if text else None,
        "calibration": {
            "text": text.tokens.name,
            "texts": [{"text": part.name, "tokens": len(part.ids), "hash": part.hash} for part in text.fitted],
            "tokens": len(text.tokens.ids),
            "context": text.calibration.context,
            "max_context": text.calibration.max_context,
            "retrieval_limit": text.calibration.retrieval_limit,
        }
        if text
        else None,
        **(calibrated.as_dict() if calibrated else {}),
        **({"rotary_frequencies": list(choice.pairs)} if spec.kv_lora_rank else {}),
        **({"kept_layers": list(spec.kept)} if spec.kept else {}),
        "notes": [*plan.notes, *(text.remarks(plan.channels) if text else [])],
        "layers": [{key: value for key, value in layer.items() if key not in ("converted", "renamed")} for layer in layers],
        "tensors": _tensors(job.manifest, layers),
        "versions": versions(),
        "loading": loading_of(plan.target.host, plan.family, spec),
        "metadata": metadata_of(plan.source.repository, tags, plan.source.files),
    }


def with_healing(provenance: dict[str, Any], healing: dict[str, Any] | None) -> dict[str, Any]:
    """The provenance of a result that was then healed, or was not.

    Args:
        provenance: From `provenance_of`.
        healing: The entry `healing`, with the names of the tensors that changed as `tensors`.
    """
    if healing is None:
        return provenance | {"healing": None}
    course, healed = {key: value for key, value in healing.items() if key != "tensors"}, healing["tensors"]
    copied = sorted(set(provenance["tensors"]["copied"]) - set(healed))
    return provenance | {"healing": course, "tensors": provenance["tensors"] | {"copied": copied, "healed": healed}}


def _tensors(manifest: Manifest, layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fate of every tensor of the source, and the origin of every tensor of the result, by the notes of layers."""
    written, infos = manifest.infos, manifest.reader.infos
    made = {name for unit in manifest.units if unit.layer is None and not unit.copies for name in unit.outputs}
    renamed = {
        source.name: place.name
        for unit in manifest.units
        if unit.copies
        for source, place in zip(unit.sources, unit.places, strict=True)
        if source.name != place.name
    }
    for layer in layers:
        renamed |= layer.get("renamed", {})
    converted = made.union(*(layer["converted"] for layer in layers))
    origin = {name: name for name in infos} | {new: old for old, new in renamed.items()}
    cast = {name for name, info in written.items() if name in origin and info.dtype != infos[origin[name]].dtype}
    return {
        "converted": sorted(converted),
        "cast": sorted(cast - converted),
        "copied": sorted(written.keys() - converted - cast - set(renamed.values())),
        **({"renamed": renamed} if renamed else {}),
        "dropped": {name: why for name, why in manifest.dropped.items() if name not in renamed},
    }


def model_card(plan: Plan, provenance: dict[str, Any]) -> str:
    """The text of README.md for a conversion.

    Args:
        plan: The plan that was carried out.
        provenance: conversion.json without its `run`.
    """
    evaluation, recipe, method = provenance.get("evaluation"), plan.recipe, plan.target.method
    summary = f"method `{method.name}`, {method.summary}{f' ({method.source})' if method.source else ''}"
    options = {name: value for name, value in recipe.items() if name != "model"}
    texts = as_options(plan.calibration.texts) if plan.calibration else {}
    model = recipe["model"] if plan.source.repository else plan.source.reference
    return render(
        "conversion.md.j2",
        provenance["metadata"],
        after=plan.target.spec,
        before_kind=plan.before.kind,
        base=plan.source.repository or plan.source.name,
        link=f"https://huggingface.co/{quote(plan.source.repository)}" if plan.source.repository else None,
        summary=summary if provenance["method"] else markdown(str(provenance["notes"][0])),
        command=command_line(plan.target.command, model, options | texts),
        bytes=provenance["kv_bytes_per_token"],
        plan=plan,
        provenance=provenance,
        evaluation=evaluation,
        warn_above=WARN_ABOVE,
        protocol=evaluation["protocol"] if evaluation else None,
        compared=compared(evaluation["models"]) if evaluation else [],
        loading=provenance["loading"],
        loss_text=loss_text,
        calibrated=Calibrated.read(provenance),
    )


def compared(entries: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The source and the result of an evaluation: first as they are, then with their caches in each format.

    A source whose heads cannot have a format is compared as it is.
    """
    found = []
    for form in dict.fromkeys(entry["cache_format"] for entry in entries):
        *sources, result = (entry for entry in entries if entry["cache_format"] == form)
        found.append((sources[0] if sources else entries[0], result))
    return found


def loading_of(host: Host, family: Family, spec: AttentionSpec) -> dict[str, Any]:
    """How to load and serve a result of these sizes, as conversion.json keeps it and cards say it."""
    own, made = host.name == "its own class", (host, family, spec)
    objections = {engine: engine.objection(*made) for engine in ENGINES.values() if engine.serve}
    remarks = list(host.remarks)
    for engine in (engine for engine, objection in objections.items() if objection is None):
        caches = engine.stores(host, spec)
        said = [f"{cache.form} with `{cache.option}`{'' if cache.tried else ' (not tried)'}" for cache in caches]
        remarks += [f"{engine.name} stores the cache in {', or in '.join(said)}."] if said else []
    return {
        "model_type": host.layout(family).model_type,
        "needs_code": bool(host.code),
        "opened_by": host.opened_by,
        "arguments": {"trust_remote_code": True} if host.code else {},
        "engines": [
            {
                "name": f"{engine.name}, if it runs the source" if own else engine.name,
                "objection": objection,
                "command": engine.serve.format(path="path/to/this/directory", eager=" --enforce-eager" * host.eager),
            }
            for engine, objection in objections.items()
        ],
        "remarks": remarks,
    }
