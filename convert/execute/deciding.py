"""Surveys the source, and chooses what all layers share before the first one changes: their frequencies, and the rank of each.

A choice is a value that is passed on. Its copy in the work directory only serves a resumed run.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from attention.errors import Failure
from attention.formats import format_named
from attention.forward import attention_output
from convert.calibration.stream import LayerStream
from convert.calibration.survey import survey
from convert.checkpoint.loading import empty_model
from convert.execute.job import Job
from convert.methods.latent import Allocation
from convert.methods.ranks import interpolated, measured_ranks, shared_out
from convert.methods.statistics import EXCERPT, Statistics
from convert.planning.calibration import CalibrationText
from convert.planning.targets import Choice, LatentTarget
from eval.inputs.sealed import Shelf
from eval.terminal.progress import stage

_SILENT = 1e-30  # the energy of an output that is nothing

StatisticsOf = Callable[[int], Statistics]


def surveyed(job: Job, text: CalibrationText) -> StatisticsOf:
    """Maps a layer to its statistics on the text, which are surveyed when they are first asked for."""
    seen = text.surveyed()

    @cache
    def found() -> StatisticsOf:
        spool, shelf = job.statistics_in / "source-inputs", Shelf(job.statistics_in, "source")
        model, paths = empty_model(job.plan.source.config), job.plan.family
        stream = LayerStream(model, paths, job.manifest.reader, seen.blocks, spool, job.plan.runs_on)
        return survey(stream, shelf, lambda layer: job.read_layer(layer)[1], job.shows_attention, job.progress)

    return lambda layer: found()(layer)


def choose(job: Job, target: LatentTarget, statistics: StatisticsOf) -> Choice:
    """Measure what a latent's method needs to know about the whole model, and choose.

    Raises:
        Failure: Weights or activations are not finite.
    """
    if kept := job.work.recall("choice"):  # of an interrupted run
        return Choice(tuple(kept["pairs"]), tuple(kept["ranks"]))
    count, allocation = target.spec.qk_rope_head_dim // 2, target.allocation(job.plan.rotary)
    measure, measured, pairs = target.method.measure, list[torch.Tensor](), tuple[int, ...]()
    if count and measure is not None:  # what not rotating each component costs
        layers = [layer for layer in range(job.plan.before.num_layers) if job.plan.family.rotary(layer)]
        with stage(job.progress, "measure", len(layers), "layer") as done:
            for layer in layers:
                measured.append(measure(job.read_layer(layer)[1], statistics(layer)).cpu())
                done(1)
    if count:
        pairs = target.method.allocate(measured, count, allocation)
    ranks = _ranks(job, target, replace(allocation, pairs=pairs), statistics) if target.ranks else ()
    job.work.remember("choice", {"pairs": pairs, "ranks": ranks})
    return Choice(pairs, ranks)


def _ranks(job: Job, target: LatentTarget, allocation: Allocation, statistics: StatisticsOf) -> tuple[int, ...]:
    """A rank for each layer, by the errors of its attention's output on the sample.

    They are relative to the residual stream, to which it is added, or to the output itself where a norm follows it.
    """
    tried, costs, layers = measured_ranks(target.ranks), [], target.spec.num_layers
    with stage(job.progress, "rank", layers, "layer") as done:
        for layer in range(layers):
            before, measured = job.read_layer(layer)[1], statistics(layer).to(job.plan.runs_on)
            assert measured.sample is not None
            assert measured.inverse_energy is not None
            blocks = measured.sample.spread(EXCERPT).blocks
            expected = attention_output(before, blocks)
            energy = float(expected.double().square().sum(-1).mean())
            norm = job.plan.family.names.holding(f"layers.{layer}.attention_output_norm.weight")
            normalised = norm is not None and norm.name in job.manifest.reader.infos
            importance = 1 / max(energy, _SILENT) if normalised else measured.inverse_energy
            errors = []
            for rank in tried:
                after = target.method.factor(before, replace(allocation, rank=rank), measured)
                lacking = attention_output(after, blocks) - expected
                errors.append(importance * float(lacking.double().square().sum(-1).mean()))
            if not all(map(math.isfinite, errors)):
                raise Failure(
                    f"attention outputs of layer {layer} overflow on the calibration text: errors at ranks {tried}: {errors}",
                    hint="the source's weights are extreme; does `convert eval` of it work?",
                )
            costs.append(interpolated(tried, errors, target.ranks))
            done(1)
    form = format_named(target.cache_dtype or "float32")  # without scales, any dtype shares out alike
    prices, mean = [form.row_bytes(rank, "latent") for rank in target.ranks], target.spec.kv_lora_rank or 0
    context = job.plan.context
    tokens = target.spec.tokens_held(context) if target.spec.is_cut(context) else [1] * layers
    return shared_out(costs, target.ranks, prices, sum(tokens) * form.row_bytes(mean, "latent"), tokens)
