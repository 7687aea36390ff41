"""Converts the layers of a plan: decides for the whole model, then reads, transforms, writes and verifies layer by layer.

It knows the order of the work, but no heads, names or formulas: those belong to the family, the method and the host.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from attention.errors import Failure
from convert.calibration.survey import survey
from convert.checkpoint.loading import class_names, require_loadable
from convert.checkpoint.shelf import Shelf
from convert.execute.deciding import Choice, StatisticsOf, choose
from convert.execute.job import Job
from convert.execute.layer import Layer, changed, error_of
from convert.execute.manifest import Manifest, manifest_of
from convert.execute.provenance import provenance_of
from convert.execute.sequence import in_sequence
from convert.execute.weights import MakeLayer, require_space, write_weights
from convert.output.companions import copy_code, copy_companions, write_config
from convert.output.tokenizer import name_tokenizer_class, tokenizer_class
from convert.output.writing import Work
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText
from eval.inputs.reader import Reader, TensorInfo
from eval.inputs.source import Source


def reader_of(plan: Plan) -> Reader:
    """Reads the source's tensors by the names of its class."""
    source = plan.source
    # Of a decoder inside another model, files and classes name what is around it differently.
    inside = source.decoder is not source.config and not plan.family.needs_code
    return source.reader(partial(class_names, source.config) if inside else plan.family.renamed)


def loadable_manifest(plan: Plan, reader: Reader) -> Manifest:
    """The tensors to write. Their names and shapes are those of the class: no work starts that could not be loaded.

    Raises:
        Failure: The source's headers do not match its config, or the class.
    """
    source = plan.source
    manifest = manifest_of(plan, reader, plan.target.spec)  # first, since its messages on attention are more specific
    require_loadable(source.config, _without_computed(plan, reader), source.reference)
    if not plan.target.copies:
        sized = plan.target.host.sized(source.raw, plan.family, plan.target.spec)
        result = f"the {plan.target.spec.kind} of {source.reference}"
        require_loadable(sized, manifest.outputs, result)
    return manifest


def convert_layers(job: Job, manifest: Manifest) -> dict[str, Any]:
    """Choose, then write everything but the provenance, which is returned.

    Raises:
        Failure: Weights or activations are not finite, or the disk is too full.
    """
    try:
        require_space(job, manifest)
        plan, source, directory = job.plan, job.plan.source, job.work.path
        named = tokenizer_class(source, plan.target.config(source.raw, plan.family, plan.target.spec, None))
        surveyed = _surveyed(job, job.text) if job.text and plan.reads_text else None
        choice = choose(job, surveyed or job.assumed)
        if choice.ranks:
            manifest = manifest_of(plan, job.reader, choice.spec(plan))
        layers = write_weights(job, manifest, _layers(job, manifest, choice, surveyed))
        write_config(directory, plan.config(choice.spec(plan), choice.rotary(plan)), plan.output.dtype)
        copy_companions(directory, source.files, source.trust_remote_code)
        copy_code(directory, plan.target.host.code)
        if named:
            name_tokenizer_class(directory, named, source.tokenizer_code)
        written = _check_result(plan, job.work)
        return provenance_of(plan, choice, job.reader, manifest, layers, job.text, written.calibrated)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # missing in torch's stubs
        raise Failure(
            f"a decomposition failed: {' '.join(str(error).split())[:120]}",
            hint="the model's weights or activations are extreme; please report it",
        ) from None


def _check_result(plan: Plan, work: Work) -> Source:
    """Check the written files against the class that will load them."""
    written = plan.source.beside(work.path)
    infos = _without_computed(plan, Reader(work.path))
    require_loadable(written.config, infos, "the result")
    return written


def _without_computed(plan: Plan, reader: Reader) -> dict[str, TensorInfo]:
    """All tensors but those of attentions that old checkpoints hold and the class computes itself."""
    inside = tuple(f"{plan.family.module(layer)}." for layer in range(plan.before.num_layers))
    computed = {name for name in reader.infos if name.startswith(inside) and name.endswith(plan.family.computed)}
    return {name: info for name, info in reader.infos.items() if name not in computed}


def _surveyed(job: Job, text: CalibrationText) -> StatisticsOf:
    """Maps a layer to its statistics on the text, which are surveyed when they are first asked for."""
    seen = text.surveyed()

    @cache
    def found() -> StatisticsOf:
        plan, spool, shelf = job.plan, job.statistics_in / "source-inputs", Shelf(job.statistics_in, "source")
        stream = job.stream(seen, plan.source.config, plan.family, job.reader, spool)
        return survey(stream, shelf, lambda layer: job.read_layer(layer)[1], job.shows_attention, job.progress)

    return lambda layer: replace(found()(layer), context=seen.calibration.max_context)


def _layers(job: Job, manifest: Manifest, choice: Choice, surveyed: StatisticsOf | None) -> MakeLayer:
    """Maps a layer's index to the converted layer."""
    statistics = surveyed or job.assumed
    if job.text and surveyed and job.text.calibration.in_sequence and not job.plan.target.copies:
        return in_sequence(job, job.text, manifest, choice)

    def make(index: int) -> Layer:
        tensors, before = job.read_layer(index)
        seen = statistics(index)
        after = changed(job, choice, before, index, seen)
        return Layer.of(job.plan, choice.spec(job.plan), index, tensors, after, **error_of(job, before, after, seen.sample))

    return make
