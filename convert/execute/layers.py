"""Converts the layers of a plan: decides for the whole model, then reads, transforms, writes and verifies layer by layer.

It knows the order of the work, but no heads, names or formulas: those belong to the family, the method and the host.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from attention.errors import Failure
from convert.calibration.stream import LayerStream
from convert.calibration.survey import survey
from convert.checkpoint.loading import empty_model, require_loadable
from convert.checkpoint.shelf import Shelf
from convert.execute.deciding import StatisticsOf, choose
from convert.execute.describe import provenance_of
from convert.execute.job import Job
from convert.execute.layer import as_stored, changed, error_of
from convert.execute.manifest import manifest_of, without_computed
from convert.execute.sequence import in_sequence
from convert.execute.weights import MakeLayer, calibration_bytes, write_weights
from convert.methods.text import TextUse
from convert.output.companions import copy_code, copy_companions, name_tokenizer_class, tokenizer_class, write_config
from convert.planning.calibration import CalibrationText
from convert.planning.targets import LatentTarget
from eval.inputs.reader import Reader
from eval.inputs.sealed import Content


def convert_layers(job: Job) -> dict[str, Any]:
    """Choose, then write everything but the provenance, which is returned.

    Raises:
        Failure: Weights or activations are not finite, or the disk is too full.
    """
    plan, work, source, target = job.plan, job.work, job.plan.source, job.plan.target
    try:
        shards = job.manifest.shards(plan.output.max_shard_size)
        needed = sum(unit.nbytes for name, shard in shards.items() if work.done(name) is None for unit in shard)
        work.require_space(needed + (calibration_bytes(job, job.text) if job.text and needed else 0))
        named = tokenizer_class(source, plan.plain_config(target.spec, None))
        statistics = job.assumed
        if job.text and (job.text.calibration.in_sequence or target.method.text is not TextUse.IGNORED):  # not to heal alone
            statistics = _surveyed(job, job.text)
        if isinstance(target, LatentTarget) and not target.copies:
            job = replace(job, choice=choose(job, target, statistics))
        if job.choice.ranks:
            sized = target.host.sized(source.raw, plan.family, job.spec)
            manifest = manifest_of(plan, job.manifest.reader, sized)
            job, shards = replace(job, manifest=manifest), manifest.shards(plan.output.max_shard_size)
        layers = write_weights(work, job.manifest, shards, _layers(job, statistics), job.progress)
        write_config(work.path, plan.config(job.spec, job.choice.pairs), plan.output.dtype)
        copy_companions(work.path, source.files, source.trust_remote_code)
        copy_code(work.path, target.host.code)
        if named:
            name_tokenizer_class(work.path, named)
        written = source.beside(work.path)
        require_loadable(written.config, without_computed(plan.family, Reader(work.path)), "the result")
        return provenance_of(job, layers, written.calibrated)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # missing in torch's stubs
        raise Failure(
            f"a decomposition failed: {' '.join(str(error).split())[:120]}",
            hint="the model's weights or activations are extreme; please report it",
        ) from None


def _surveyed(job: Job, text: CalibrationText) -> StatisticsOf:
    """Maps a layer to its statistics on the text, which are surveyed when they are first asked for."""
    seen = text.surveyed()

    @cache
    def found() -> StatisticsOf:
        spool, shelf = job.statistics_in / "source-inputs", Shelf(job.statistics_in, "source")
        model, paths = empty_model(job.plan.source.config), job.plan.family
        stream = LayerStream(model, paths, job.manifest.reader, seen.blocks, spool, job.plan.runs_on)
        return survey(stream, shelf, lambda layer: job.read_layer(layer)[1], job.shows_attention, job.progress)

    return lambda layer: found()(layer)


def _layers(job: Job, statistics: StatisticsOf) -> MakeLayer:
    if job.text and job.text.calibration.in_sequence:
        return in_sequence(job, job.text)

    def make(index: int) -> Content:
        tensors, before = job.read_layer(index)
        seen = statistics(index)
        after = changed(job, before, index, seen)
        return as_stored(job, index, tensors, after, error_of(job, before, after, seen))

    return make
