"""The weights of a conversion: whether the disk has room for them, and writing them shard by shard, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from convert.checkpoint.writer import write_index, write_shard
from convert.execute.job import Job
from convert.execute.manifest import Manifest, Unit
from convert.methods.latent import LatentMethod
from convert.methods.statistics import SURVEYED
from convert.output.writing import Work
from convert.planning.calibration import CalibrationText
from eval.inputs.reader import Reader
from eval.inputs.sealed import Content
from eval.machine.device import trim_memory
from eval.terminal.progress import Progress, stage

MakeLayer = Callable[[int], Content]  # a layer's tensors and its note, by its index


def calibration_bytes(job: Job, text: CalibrationText) -> int:
    """Disk space that statistics, samples, the inputs of two layers at a time, and layers converted in sequence still take."""
    plan, method = job.plan, job.plan.target.method
    width = plan.source.decoder.hidden_size
    needed = inputs = 2 * 4 * len(text.tokens.ids) * width
    if isinstance(method, LatentMethod) or not text.calibration.in_sequence:  # the survey
        sample = 2 * width * max(text.calibration.context, SURVEYED)
        needed += plan.before.num_layers * (8 * plan.channels * (4 * plan.channels + 2) + sample)
        if plan.reads_projections:  # queries, head by head
            needed += plan.before.num_layers * 8 * plan.before.num_heads * (plan.before.key_dim + 1) ** 2
    if text.calibration.in_sequence:
        converted = (unit for unit in job.manifest.units if unit.layer is not None)
        needed += inputs + sum(4 * math.prod(info.shape) for unit in converted for info in unit.outputs.values())
    there = (file for directory in {job.statistics_in, job.work.steps} for file in directory.iterdir())
    return max(0, needed - sum(file.stat().st_size for file in there))


def write_weights(
    work: Work, manifest: Manifest, shards: Mapping[str, list[Unit]], make_layer: MakeLayer, progress: Progress
) -> list[dict[str, Any]]:
    """Write every missing weight file, of the units that `shards` gives it.

    Returns:
        The note of each layer.
    """
    notes: list[dict[str, Any]] = []
    with stage(progress, "convert", manifest.nbytes, "byte") as done:
        for name, shard in shards.items():
            note = work.done(name)
            if note is not None:
                done(sum(unit.nbytes for unit in shard))
            else:
                tensors, note = _fill(manifest.reader, shard, make_layer)
                dtypes = {tensor: info.dtype for unit in shard for tensor, info in unit.outputs.items()}
                work.note(name, note, write_shard(work.path / name, tensors, dtypes, done))
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
