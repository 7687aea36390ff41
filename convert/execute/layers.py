"""Converts the layers of a plan: decides for the whole model, then reads, transforms, writes and verifies layer by layer.

It knows the order of the work, but no heads, names or formulas: those belong to the family, the method and the host.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attention.errors import Failure
from convert.checkpoint.loading import require_loadable
from convert.checkpoint.writer import write_index, write_shard
from convert.execute.deciding import StatisticsOf, choose, surveyed
from convert.execute.describe import provenance_of
from convert.execute.job import Job
from convert.execute.manifest import Manifest, Unit, without_computed
from convert.execute.precision import precise_layers
from convert.execute.sequence import first_tokens, in_sequence
from convert.methods.latent import LatentMethod
from convert.methods.statistics import SURVEYED
from convert.methods.text import TextUse
from convert.output.companions import copy_code, copy_companions, name_tokenizer_class, tokenizer_class, write_config
from convert.output.writing import Work
from convert.planning.calibration import CalibrationText
from convert.planning.targets import LatentTarget
from eval.inputs.reader import Reader
from eval.inputs.sealed import Content
from eval.machine.device import trim_memory
from eval.terminal.progress import Progress, stage

MakeLayer = Callable[[int], Content]  # a layer's tensors and its note, by its index


def convert_layers(job: Job) -> dict[str, Any]:
    """Choose, then write everything but the provenance, which is returned.

    Raises:
        Failure: Weights or activations are not finite, or the disk is too full.
    """
    plan, work, source, target = job.plan, job.work, job.plan.source, job.plan.target
    try:
        shards = job.manifest.shards(plan.output.max_shard_size)
        needed = sum(unit.nbytes for name, shard in shards.items() if work.recall(name) is None for unit in shard)
        work.require_space(needed + (_calibration_bytes(job, job.text) if job.text and needed else 0))
        named = tokenizer_class(source, plan.plain_config(None))
        statistics: StatisticsOf = job.assumed
        if job.text and (job.text.calibration.refit or target.method.text is not TextUse.IGNORED):  # not to heal alone
            statistics = surveyed(job, job.text)
        if isinstance(target, LatentTarget):
            job = replace(job, choice=choose(job, target, statistics))
        make_layer: MakeLayer = partial(job.converted, statistics=statistics)
        if job.text and job.text.calibration.refit:
            make_layer = in_sequence(job, job.text)
        layers = _write_weights(work, job.manifest, shards, make_layer, job.progress)
        write_config(work.path, plan.config(job.choice.pairs), plan.output.dtype)
        copy_companions(work.path, source.files, source.trust_remote_code)
        copy_code(work.path, target.host.code)
        if named:
            name_tokenizer_class(work.path, named)
        written = source.beside(work.path)
        require_loadable(written.config, without_computed(plan.family, Reader(work.path)), "the result")
        precise = precise_layers(job, written)
        write_config(work.path, plan.config(job.choice.pairs) | precise, plan.output.dtype)
        return provenance_of(job, layers, written.calibrated) | precise
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # missing in torch's stubs
        raise Failure(
            f"a decomposition failed: {' '.join(str(error).split())[:120]}",
            hint="the model's weights or activations are extreme; please report it",
        ) from None


def _calibration_bytes(job: Job, text: CalibrationText) -> int:
    """Disk space that statistics, samples, the inputs of two layers at a time, and layers converted in sequence still take."""
    plan, method = job.plan, job.plan.target.method
    width = plan.source.decoder.hidden_size
    needed = inputs = 2 * 4 * len(text.tokens.ids) * width
    if isinstance(method, LatentMethod) or not text.calibration.refit:  # the survey
        sample = 2 * width * max(text.calibration.context, SURVEYED)
        surveyed = len(job.spec.changed)
        needed += surveyed * (8 * plan.channels * (4 * plan.channels + 2) + sample)
        if plan.reads_projections:  # queries, head by head
            needed += surveyed * 8 * plan.before.num_heads * (plan.before.key_dim + 1) ** 2
    if text.calibration.refit:
        converted = (unit for unit in job.manifest.units if unit.layer is not None)
        needed += inputs + 4 * 4 * len(first_tokens(plan.source.vocabulary).rows) * width
        needed += sum(4 * math.prod(info.shape) for unit in converted for info in unit.outputs.values())
    there = (file for directory in {job.statistics_in, job.work.steps} for file in directory.iterdir())
    return max(0, needed - sum(file.stat().st_size for file in there))


def _write_weights(
    work: Work, manifest: Manifest, shards: Mapping[str, list[Unit]], make_layer: MakeLayer, progress: Progress
) -> list[dict[str, Any]]:
    """Write every missing weight file, of the units that `shards` gives it.

    Returns:
        The note of each layer.
    """
    notes: list[dict[str, Any]] = []
    with stage(progress, "convert", manifest.nbytes, "byte") as done:
        for name, shard in shards.items():
            note = work.recall(name)
            if note is not None:
                done(sum(unit.nbytes for unit in shard))
            else:
                tensors, note = _fill(manifest.reader, shard, make_layer)
                dtypes = {tensor: info.dtype for unit in shard for tensor, info in unit.outputs.items()}
                work.remember(name, note, {name: write_shard(work.path / name, tensors, dtypes, done)})
            notes += note
    if len(shards) > 1:
        contents = {name: [tensor for unit in shard for tensor in unit.outputs] for name, shard in shards.items()}
        write_index(work.path, contents, manifest.nbytes)
    return sorted(notes, key=lambda entry: entry["layer"])


def _fill(reader: Reader, shard: list[Unit], make_layer: MakeLayer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """One shard's tensors (mapped if copied, else computed) and the notes of its layers."""
    tensors: dict[str, torch.Tensor] = {}
    notes = []
    for unit in shard:
        if unit.layer is None:
            tensors |= unit.make(reader.__getitem__)
            continue
        converted, note = make_layer(unit.layer)
        for name, info in unit.outputs.items():
            found = converted[name].shape
            assert found == info.shape, f"{name} came out as {list(found)}, and config.json will say {list(info.shape)}"
        tensors |= converted
        notes.append(note)
        trim_memory()
    return tensors, notes
