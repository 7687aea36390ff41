"""Surveys the source, and chooses what all layers share before the first one changes: their frequencies.

A choice is a value that is passed on. Its copy in the work directory only serves a resumed run.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain

import torch

from attention.errors import Failure
from attention.forward import output_at
from attention.record import Attention, Record
from attention.spread import evenly_spread
from convert.calibration.stream import LayerStream
from convert.calibration.survey import survey
from convert.checkpoint.loading import empty_model
from convert.execute.job import Job
from convert.methods.frequencies import pairs_by_trial
from convert.methods.statistics import EXCERPT, Statistics
from convert.planning.calibration import CalibrationText
from convert.planning.targets import Choice, LatentTarget
from eval.inputs.sealed import Shelf
from eval.terminal.progress import stage

_SILENT = 1e-30  # the energy of an output that is nothing
_EVERY = 8  # one token of so many is looked at

StatisticsOf = Callable[[int], Statistics]
Rotating = Callable[[Attention, Statistics], Callable[[Sequence[int]], Record]]


def surveyed(job: Job, text: CalibrationText) -> StatisticsOf:
    """Maps a layer to its statistics on the text, which are surveyed when they are first asked for."""

    @cache
    def found() -> StatisticsOf:
        spool, shelf = job.statistics_in / "source-inputs", Shelf(job.statistics_in, "source")
        model, paths = empty_model(job.plan.source.config), job.plan.family
        stream = LayerStream(model, paths, job.manifest.reader, text.surveyed().blocks, spool, job.plan.runs_on)
        layers = job.spec.changed
        return survey(stream, shelf, lambda layer: job.read_layer(layer)[1], layers, job.shows_attention, job.progress)

    return lambda layer: found()(layer)


def choose(job: Job, target: LatentTarget, statistics: StatisticsOf) -> Choice:
    """Measure what a latent's method needs to know about the whole model, and choose.

    Raises:
        Failure: Weights or activations are not finite.
    """
    if kept := job.work.recall("choice"):  # of an interrupted run
        return Choice(tuple(kept["pairs"]))
    count, allocation = target.spec.qk_rope_head_dim // 2, target.allocation(job.plan.rotary)
    method, measured = target.method, list[torch.Tensor]()
    layers = [layer for layer in target.spec.changed if job.plan.family.rotary(layer)]
    if count and method.measure is not None:  # what not rotating each component costs
        with stage(job.progress, "measure", len(layers), "layer") as done:
            for layer in layers:
                measured.append(method.measure(job.read_layer(layer)[1], statistics(layer)).cpu())
                done(1)
    if count and method.rotating is not None and job.shows_attention and not allocation.ladder:
        pairs = pairs_by_trial(measured, count, partial(_errors, job, layers, statistics, method.rotating))
    else:
        pairs = method.allocate(measured, count, allocation) if count else ()
    job.work.remember("choice", {"pairs": pairs})
    return Choice(pairs)


def _errors(job: Job, layers: list[int], statistics: StatisticsOf, rotating: Rotating, choices: list[list[int]]) -> list[float]:
    """Sum over layers what their outputs lose with each choice of frequencies, at some tokens of the sample.

    Squared errors are relative to the residual stream, to which outputs are added, or to the outputs where a norm follows them.
    """
    found = list[list[float]]()
    with stage(job.progress, "try frequencies", len(layers), "layer") as done:
        for layer in layers:
            before, seen = job.read_layer(layer)[1], statistics(layer).to(job.plan.runs_on)
            assert isinstance(before, Attention)
            assert seen.sample is not None
            assert seen.inverse_energy is not None
            sample = seen.sample.spread(EXCERPT)
            tokens = torch.tensor(evenly_spread(-(-sample.context // _EVERY), sample.context), device=job.plan.runs_on)
            records = chain([before], map(rotating(before, seen), choices))
            outputs = (torch.cat([output_at(one, x, tokens) for x in sample.blocks]).double() for one in records)
            expected, norm = next(outputs), job.plan.family.names.holding(f"layers.{layer}.attention_output_norm.weight")
            scale = seen.inverse_energy
            if norm is not None and norm.name in job.manifest.reader.infos:
                scale = 1 / max(float(expected.square().sum(-1).mean()), _SILENT)
            found.append([scale * float((one - expected).square().sum(-1).mean()) for one in outputs])
            if not all(map(math.isfinite, found[-1])):
                raise Failure(
                    f"attention outputs of layer {layer} overflow on the calibration text: they lose {found[-1]}",
                    hint="the source's weights are extreme; does `convert eval` of it work?",
                )
            done(1)
    return [math.fsum(of_layers) for of_layers in zip(*found, strict=True)]
