"""Layers converted in order, each behind the converted ones before it, so that it can make up for what they lost.

Two models run side by side over the calibration text, a layer at a time: the source, which says what should come out, and the
result as far as it is made. Finished layers and the inputs of the next one lie on disk, where `--resume` finds them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from tqdm import tqdm

from attention.record import Attention, FactoredAttention, Record
from attention.rope import Rotary
from convert.calibration.refine import refined
from convert.calibration.refit import OutputFit
from convert.calibration.stream import LayerStream
from convert.calibration.survey import Moments
from convert.checkpoint.reader import TensorInfo
from convert.checkpoint.shelf import Shelf
from convert.execute.job import Job
from convert.execute.layer import Layer
from convert.methods.statistics import Statistics

Change = Callable[[Attention, int, Statistics], tuple[Attention, Record]]


def in_sequence(
    job: Job, change: Change, rotary: Rotary | None, statistics: Callable[[int], Statistics]
) -> Callable[[int], Layer]:
    """Convert all layers.

    Args:
        job: Its plan says how: whether statistics come through converted layers, and how many steps of refinement there are.
        change: `(record, layer, statistics) -> the record with its heads in the order of the result, and that of the result`.
        rotary: How the rotary key of MLA turns.
        statistics: Of the source's layers.

    Returns:
        Layer → what was made of it.
    """
    shelf = Shelf(job.work.survey, "layer")
    layers, calibration = job.plan.before.num_layers, job.plan.calibration
    assert calibration is not None
    missing = next((layer for layer in range(layers) if not shelf.has(layer)), None)
    if missing is None:
        return partial(_get, shelf)
    teacher, student = _streams(job, rotary)
    guided = calibration.refit or calibration.refine
    begin = _begin(missing, teacher, student) if guided else _begin(missing, student)
    for layer in tqdm(range(begin, layers), desc="fit", unit="layer", file=sys.stderr, disable=job.quiet or None):
        if shelf.has(layer):
            if guided:
                teacher.advance(layer, keep=True)
        else:
            tensors, before = job.read_layer(layer)
            known = _observed(student, layer) if calibration.propagate else statistics(layer)
            before, after = change(before, layer, known)
            after, more = _fitted(job, after, layer, teacher, student) if guided else (after, {})
            converted = Layer.of(job, layer, tensors, before, after, **more)
            shelf.put(layer, converted.tensors, converted.note)
        if layer + 1 < layers:
            student.advance(layer, weights=shelf.get(layer)[0])
    for stream in (teacher, student):
        stream.discard()
    return partial(_get, shelf)


def _get(shelf: Shelf, layer: int) -> Layer:
    return Layer(*shelf.get(layer))


def _fitted(job: Job, after: Record, layer: int, teacher: LayerStream, student: LayerStream) -> tuple[Record, dict[str, float]]:
    """The record brought closer to its source, and what that did; the teacher is past the layer then."""
    plan, calibration = job.plan, job.plan.calibration
    assert calibration is not None

    def write(record: Record) -> dict[str, torch.Tensor]:
        tensors = plan.host.tensors(plan.family, record, plan.target, layer)
        return {name: tensor.float() for name, tensor in tensors.items()}

    if isinstance(after, FactoredAttention) and after.o_bias is None:  # every host of a latent has a place for it
        after = replace(after, o_bias=torch.zeros_like(after.o[:, 0, 0]))
    if not calibration.refit:
        teacher.advance(layer, keep=True)
    else:
        fit, weights = OutputFit(after), write(after)
        lacking = plan.family.traits(plan.source.config).adds_output
        with student.opened(layer) as run:

            def attended(batch: int, inputs: torch.Tensor, added: torch.Tensor) -> None:
                own = student.batch(layer, batch)
                read = run.into(own, weights, plan.host.output(plan.family, layer))
                fit.see(read, added + inputs - own if lacking else added)

            teacher.advance(layer, attended=attended, keep=True)
        after = fit.record()
    return refined(after, write, student, teacher, layer, calibration.refine, plan.seed) if calibration.refine else (after, {})


def _streams(job: Job, rotary: Rotary | None) -> tuple[LayerStream, LayerStream]:
    """The source and the result, whose attentions are given when layers are run."""
    from transformers import AutoConfig

    plan, layers, infos = job.plan, range(job.plan.before.num_layers), job.reader.infos
    replaced = {name for layer in layers for name in plan.family.shapes(plan.source.config, layer)}
    shapes = [plan.host.shapes(plan.family, plan.source.config, plan.target, layer) for layer in layers]
    made = {name: TensorInfo(shape, torch.float32) for layer in shapes for name, shape in layer.items()}
    kept = {name: info for name, info in infos.items() if name not in replaced}
    config = AutoConfig.for_model(**plan.host.config(plan.source.raw, plan.source.config, plan.target, rotary))
    source = job.stream(plan.source.config, plan.family.module, infos, job.work.survey / "teacher")
    return source, job.stream(config, partial(plan.host.module, plan.family), kept | made, job.work.survey / "student")


def _begin(missing: int, *streams: LayerStream) -> int:
    """The last layer up to the first missing one whose inputs all streams have; or 0 with those made anew.

    A layer may be missing before later ones that are there: its file lost its end.
    """
    if ready := {layer for layer in set.intersection(*(stream.ready for stream in streams)) if layer <= missing}:
        return max(ready)
    for stream in streams:
        stream.discard()
        stream.embed()
    return 0


def _observed(stream: LayerStream, layer: int) -> Statistics:
    moments = Moments(layer, *stream.blocks)
    stream.observe(layer, moments.see)
    return moments.statistics()
