"""The weights of a conversion: whether the disk has room for them, and writing them shard by shard, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from convert.checkpoint.writer import shard_names, write_index, write_shard
from convert.execute.job import Job
from convert.execute.layer import Layer
from convert.execute.manifest import Manifest, Unit, deal
from convert.methods.latent import LatentMethod
from convert.methods.statistics import EXCERPT
from convert.planning.base import Plan
from convert.planning.calibration import CalibrationText
from eval.machine.device import trim_memory
from eval.terminal.progress import stage

MakeLayer = Callable[[int], Layer]


def _shards(plan: Plan, manifest: Manifest) -> dict[str, list[Unit]]:
    shards = deal(manifest.units, plan.output.max_shard_size)
    return dict(zip(shard_names(len(shards)), shards, strict=True))


def require_space(job: Job, manifest: Manifest) -> None:
    """Fail before the first byte if the disk cannot hold shards, statistics, and the inputs of two layers at a time."""
    shards = _shards(job.plan, manifest)
    needed = sum(unit.nbytes for name, shard in shards.items() if job.work.done(name) is None for unit in shard)
    if job.text and needed:
        there = {file: file.stat().st_size for directory in {job.statistics_in, job.work.steps} for file in directory.iterdir()}
        needed += max(0, _calibration_bytes(job, job.text, manifest) - sum(there.values()))
    job.work.require_space(needed)


def _calibration_bytes(job: Job, text: CalibrationText, manifest: Manifest) -> int:
    """Disk space for statistics, samples, the inputs of two layers at a time, and layers converted in sequence."""
    plan, method = job.plan, job.plan.target.method
    width = plan.source.decoder.hidden_size
    needed = inputs = 2 * 4 * len(text.tokens.ids) * width
    if isinstance(method, LatentMethod) or not text.calibration.in_sequence:  # the survey
        sample = 2 * width * max(text.calibration.context, EXCERPT)
        needed += plan.before.num_layers * (8 * plan.channels * (4 * plan.channels + 2) + sample)
        if plan.reads_projections:  # queries, head by head
            needed += plan.before.num_layers * 8 * plan.before.num_heads * (plan.before.key_dim + 1) ** 2
    if isinstance(method, LatentMethod) and method.measured_bytes:
        needed += plan.before.num_layers * method.measured_bytes(plan.before)
    if text.calibration.in_sequence:
        converted = (unit for unit in manifest.units if unit.layer is not None)
        needed += inputs + sum(4 * math.prod(info.shape) for unit in converted for info in unit.outputs.values())
    return needed


def write_weights(job: Job, manifest: Manifest, make_layer: MakeLayer) -> list[dict[str, Any]]:
    """Write every missing shard.

    Returns:
        The note of each layer.
    """
    work, shards = job.work, _shards(job.plan, manifest)
    notes: list[dict[str, Any]] = []
    with stage(job.progress, "convert", manifest.nbytes, "byte") as done:
        for name, shard in shards.items():
            note = work.done(name)
            if note is not None:
                done(sum(unit.nbytes for unit in shard))
            else:
                tensors, note = _fill(job, shard, make_layer)
                dtypes = {tensor: info.dtype for unit in shard for tensor, info in unit.outputs.items()}
                work.note(name, note, write_shard(work.path / name, tensors, dtypes, done))
            notes += note
    if len(shards) > 1:
        contents = {name: [tensor for unit in shard for tensor in unit.outputs] for name, shard in shards.items()}
        write_index(work.path, contents, manifest.nbytes)
    return sorted(notes, key=lambda entry: entry["layer"])


def _fill(job: Job, shard: list[Unit], make_layer: MakeLayer) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """One shard's tensors (mapped if copied, else computed) and the notes of its layers."""
    tensors: dict[str, torch.Tensor] = {}
    notes = []
    for unit in shard:
        if unit.layer is None:
            tensors |= unit.make(job.reader.__getitem__)
            continue
        converted = make_layer(unit.layer)
        for name, info in unit.outputs.items():
            found = converted.tensors[name].shape
            assert found == info.shape, f"{name} came out as {list(found)}, and config.json will say {list(info.shape)}"
        tensors |= converted.tensors
        notes.append(dict(converted.note))
        trim_memory()
    return tensors, notes
