"""Chooses what all layers share before the first one changes: the frequencies that they keep, and the rank of each.

A choice is a value that is passed on. Its copy in the work directory only serves a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from attention.errors import Failure
from attention.formats import format_named
from attention.forward import attention_output, output_error
from attention.spread import evenly_spread
from convert.execute.job import Job
from convert.execute.layer import adapted
from convert.methods.latent import Allocation
from convert.methods.ranks import interpolated, measured_ranks, shared_out
from convert.methods.statistics import Statistics, excerpt
from convert.planning.targets import Choice, LatentTarget
from eval.terminal.progress import stage

_TRIED_LAYERS = 4
_TIE = 1.1  # a pursuit is taken if components err more than this many times as much; below, whole models lost more with it
_SILENT = 1e-30  # the energy of an output that is nothing

StatisticsOf = Callable[[int], Statistics]


def choose(job: Job, target: LatentTarget, statistics: StatisticsOf) -> Choice:
    """Measure what a latent's method needs to know about the whole model, and choose.

    Raises:
        Failure: Weights or activations are not finite.
    """
    if kept := job.work.recall("choice"):  # of an interrupted run
        return Choice(tuple(kept["pairs"]), kept["pursued"], tuple(kept["tried"]), tuple(kept["ranks"]))
    choice = _chosen(job, target, statistics)
    job.work.remember("choice", asdict(choice))
    return choice


def _chosen(job: Job, target: LatentTarget, statistics: StatisticsOf) -> Choice:
    count, without_pairs = target.spec.qk_rope_head_dim // 2, target.allocation(job.plan.rotary)
    measured = _measured(job, target, statistics)
    offers = target.method.allocate(measured, count, without_pairs) if count else [without_pairs.keeping((), False)]
    offer, tried = offers[0], list[dict[str, Any]]()
    if len(offers) > 1 and job.text is not None:
        errors = _errors(job, target, offers, statistics)
        tried = [
            {"rank": each.rank, "frequencies": list(each.pairs), "output_error": error}
            for each, error in zip(offers, errors, strict=True)
        ]
        offer = offers[min(range(len(offers)), key=lambda i: errors[i] * (_TIE if offers[i].pursued else 1))]
    ranks = _ranks(job, target, offer, statistics) if target.ranks else ()
    return Choice(offer.pairs, offer.pursued, tuple(tried), ranks)


def _measured(job: Job, target: LatentTarget, statistics: StatisticsOf) -> list[Any]:
    """The result of `method.measure` for each layer with RoPE."""
    plan, measure, measured = job.plan, target.method.measure, list[Any]()
    if measure is None:
        return measured
    layers = [layer for layer in range(plan.before.num_layers) if plan.family.rotary(layer)]
    with stage(job.progress, "measure", len(layers), "layer") as done:
        for layer in layers:
            path = job.work.steps / f"measured-{layer}.pt"
            with path.open("wb") as file:  # torch's own writer would hide a full disk behind its own error
                torch.save(measure(job.read_layer(layer)[1], statistics(layer), target.spec.qk_rope_head_dim // 2), file)
            # Mapped, so that memory does not hold all layers at once. Only this run reads the file.
            measured.append(torch.load(path, map_location="cpu", mmap=True, weights_only=False))
            path.unlink()
            done(1)
    return measured


def _errors(job: Job, target: LatentTarget, offers: Sequence[Allocation], statistics: StatisticsOf) -> list[float]:
    """The relative error of attention outputs on the text for each offer, averaged over evenly spread layers.

    Offers are refitted first, on the other half of the sample, since that changes their ranking.

    Raises:
        Failure: One of them is not finite.
    """
    layers = job.plan.before.num_layers
    count = min(layers, _TRIED_LAYERS)
    tried_layers = evenly_spread(count, layers)
    errors = [0.0] * len(offers)
    with stage(job.progress, "try", len(offers) * len(tried_layers), "candidate") as done:
        for layer in tried_layers:
            before, measured = job.read_layer(layer)[1], statistics(layer).to(job.device)
            assert measured.sample is not None
            rows = range(len(measured.sample.rows))
            tried, other = measured.sample.of(rows[::2]), measured.sample.of(rows[1::2] or rows)
            fitted = replace(measured, sample=other)
            for i, offer in enumerate(offers):
                made = target.method.factor(before, offer, measured)
                after = adapted(before, made, fitted, target.rounding, job.shows_attention, job.refits)
                errors[i] += output_error(before, after, tried.blocks) / count
                done(1)
    if not all(map(math.isfinite, errors)):
        raise Failure(
            f"attention outputs overflow on the calibration text: the relative errors of {len(errors)} candidates are {errors}",
            hint="the source's weights are extreme; does `convert eval` of it work?",
        )
    return errors


def _ranks(job: Job, target: LatentTarget, allocation: Allocation, statistics: StatisticsOf) -> tuple[int, ...]:
    """A rank for each layer, by the errors of its attention's output on the sample.

    They are relative to the residual stream, to which it is added, or to the output itself where a norm follows it.
    """
    tried, costs, layers = measured_ranks(target.ranks), [], target.spec.num_layers
    with stage(job.progress, "rank", layers, "layer") as done:
        for layer in range(layers):
            before, measured = job.read_layer(layer)[1], statistics(layer).to(job.device)
            assert measured.sample is not None
            assert measured.inverse_energy is not None
            blocks = excerpt(measured.sample).blocks
            expected = attention_output(before, blocks)
            energy = float(expected.double().square().sum(-1).mean())
            importance = 1 / max(energy, _SILENT) if job.normalises_output(layer) else measured.inverse_energy
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
