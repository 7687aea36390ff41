"""conversion.json: the recipe, the source, the versions, and what happened to every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from attention.calibrated import Calibrated
from convert.execute.card import loading_of
from convert.execute.deciding import Choice
from convert.execute.manifest import Manifest
from convert.output.card import metadata_of
from convert.output.provenance import versions
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText
from eval.inputs.reader import Reader


def provenance_of(
    plan: Plan,
    choice: Choice,
    reader: Reader,
    manifest: Manifest,
    layers: Sequence[dict[str, Any]],
    text: CalibrationText | None,
    calibrated: Calibrated | None,
) -> dict[str, Any]:
    """conversion.json without its `run`: the same inputs and seed give the same content.

    Args:
        plan: The plan that was carried out.
        choice: What its text has chosen.
        reader: Reads the source.
        manifest: The tensors that were written.
        layers: The notes of the converted layers.
        text: The calibration text, if there was one.
        calibrated: For how many positions the result is calibrated, as its config.json says; None for all.
    """
    spec = choice.spec(plan)
    before, after = plan.kv_bytes_per_token(spec)
    return {
        "kvfold": version("kvfold"),
        "source": {"model": plan.source.reference, "revision": plan.source.commit, "kind": plan.before.kind},
        "kind": spec.kind,
        "method": plan.applied_method,
        "recipe": plan.recipe.as_dict(),
        "kv_bytes_per_token": {
            "before": before,
            "after": after,
            "cache_dtype": plan.cache_dtype,
            **({"context": plan.context} if plan.before.is_cut(plan.context) else {}),
        },
        "calibration_hash": text.tokens.hash if text else None,
        "calibration": _calibration(text) if text else None,
        **(calibrated.as_dict() if calibrated else {}),
        **(choice.facts() if plan.target.spec.kv_lora_rank and not plan.target.copies else {}),
        "notes": [*plan.notes, *(text.remarks(plan.channels) if text else [])],
        "layers": [{key: value for key, value in layer.items() if key != "converted"} for layer in layers],
        "tensors": _tensors(reader, manifest, {name for layer in layers for name in layer["converted"]}),
        "versions": versions(),
        "loading": loading_of(plan, spec),
        "metadata": metadata_of(
            plan.source.repository, [plan.target.command, *filter(None, [plan.applied_method])], plan.source.files
        ),
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


def _calibration(text: CalibrationText) -> dict[str, Any]:
    lengths, longest = text.blocks.lengths, text.calibration.max_context
    return {
        "text": text.tokens.name,
        "texts": [{"text": part.name, "tokens": len(part.ids), "hash": part.hash} for part in text.parts],
        "tokens": len(text.tokens.ids),
        "context": lengths[0],
        "block_lengths": lengths,
        "max_context": longest,
    }


def _tensors(reader: Reader, manifest: Manifest, converted: set[str]) -> dict[str, Any]:
    """The fate of every tensor of the source, and the origin of every tensor of the result."""
    written = manifest.outputs
    made = {name for unit in manifest.units if unit.layer is None and not unit.copies for name in unit.outputs}
    renamed = {
        source.name: place.name
        for unit in manifest.units
        if unit.copies
        for source, place in zip(unit.sources, unit.places, strict=True)
        if source.name != place.name
    }
    converted = converted | made
    cast = {name for name, info in written.items() if name in reader.infos and info.dtype != reader.infos[name].dtype}
    return {
        "converted": sorted(converted),
        "cast": sorted(cast - converted),
        "copied": sorted(written.keys() - converted - cast - set(renamed.values())),
        **({"renamed": renamed} if renamed else {}),
        "dropped": manifest.dropped,
    }
