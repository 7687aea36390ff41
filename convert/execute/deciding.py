"""Decides what all layers share before the first one changes: their sizes and the frequencies that they keep.

A decision is a value that is passed on. Its copy in the work directory only serves a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from attention.errors import Failure
from attention.formats import format_named
from attention.forward import attention_output, output_error
from attention.rope import Rotary, no_rotary
from attention.spread import evenly_spread
from convert.execute.job import Job
from convert.execute.steps import Pipeline, balance, grouped_pipeline, latent_pipeline, refit
from convert.methods.latent import Allocation, LatentMethod
from convert.methods.ranks import interpolated, measured_ranks, shared_out
from convert.methods.statistics import Statistics, excerpt
from convert.output.writing import Work
from convert.planning.base import Plan
from convert.planning.targets import GroupedTarget, LatentTarget
from eval.terminal.progress import stage

_TRIED_LAYERS = 4
_TIE = 1.1  # a pursuit is taken if components err more than this many times as much; below, whole models lost more with it
_SILENT = 1e-30  # the energy of an output that is nothing

StatisticsOf = Callable[[int], Statistics]


@dataclass(frozen=True)
class Decision:
    """How to change all layers.

    Attributes:
        plan: The plan, with one of its splits of the cache chosen.
        change: The steps of each layer; None if nothing changes.
        rotary: How the rotary key of MLA rotates, in every layer.
        found: The choices that were made, for conversion.json.
    """

    plan: Plan
    change: Pipeline | None = None
    rotary: Rotary | None = None
    found: dict[str, Any] = field(default_factory=dict)


def decide(job: Job, statistics: StatisticsOf) -> Decision:
    """Measure what the plan's method needs to know about the whole model, and bind the method to it.

    Raises:
        Failure: Weights or activations are not finite.
    """
    plan, target = job.plan, job.plan.target
    if target.copies:
        return Decision(plan)
    if isinstance(target, GroupedTarget):
        return Decision(plan, grouped_pipeline(job, target))
    return _decide_latent(job, target, statistics)


def _decide_latent(job: Job, target: LatentTarget, statistics: StatisticsOf) -> Decision:
    rotary = job.plan.family.first_rotary or no_rotary()
    splits = target.splits or (target,)
    choice = _Choice.recalled(job.work)
    if choice is None:
        choice = _choose(job, splits, rotary, statistics)
        job.work.remember("decision", asdict(choice))
    chosen = splits[choice.split]
    chosen = chosen.with_ranks(choice.ranks) if choice.ranks else chosen
    allocation = chosen.allocation(rotary).keeping(choice.pairs, choice.pursued)
    tried = {"rotary_frequencies_tried": choice.tried} if choice.tried else {}
    ranks = {"kv_lora_ranks": list(choice.ranks)} if choice.ranks else {}
    found = {"rotary_frequencies": list(choice.pairs), **tried, **ranks}
    plan = job.plan if chosen is target else job.plan.choosing(chosen)
    return Decision(
        plan,
        latent_pipeline(job, chosen, allocation, choice.ranks),
        rotary.select(choice.pairs, "interleaved"),
        found,
    )


@dataclass(frozen=True)
class _Choice:
    """The chosen candidate for the layout of a latent.

    Attributes:
        split: The index of the target's split.
        pairs: The frequencies that stay rotary.
        pursued: Whether a pursuit found them.
        tried: Every candidate and its error on the text; empty if there was only one.
        ranks: The rank of each layer; empty if all have one.
    """

    split: int
    pairs: tuple[float, ...]
    pursued: bool
    tried: list[dict[str, Any]]
    ranks: tuple[int, ...] = ()

    @classmethod
    def recalled(cls, work: Work) -> _Choice | None:
        """The decision of an interrupted run, or None."""
        found = work.recall("decision")
        if found is None:
            return None
        try:
            chosen = int(found["split"]), tuple(found["pairs"]), bool(found["pursued"])
            return cls(*chosen, list(found["tried"]), tuple(found["ranks"]))
        except (KeyError, TypeError, ValueError):  # written by another version: decide again
            return None


def _choose(job: Job, splits: Sequence[LatentTarget], rotary: Rotary, statistics: StatisticsOf) -> _Choice:
    measured, tried = _measured(job, splits[0].method, splits, statistics), list[dict[str, Any]]()

    def best_of(some: Sequence[LatentTarget]) -> tuple[LatentTarget, Allocation]:
        offers = [(split, offer) for split in some for offer in _offers(split, measured, split.allocation(rotary))]
        if len(offers) == 1 or job.text is None:
            return offers[0]
        errors = _errors(job, offers, statistics)
        rows = [_tried(*offer, error) for offer, error in zip(offers, errors, strict=True)]
        tried.extend(row for row in rows if row not in tried)
        return offers[min(range(len(offers)), key=lambda i: errors[i] * (_TIE if offers[i][1].pursued else 1))]

    by_format = {split.cache_dtype: [other for other in splits if other.cache_dtype == split.cache_dtype] for split in splits}
    chosen = splits[0]
    if len(by_format) > 1:  # the format first, by the middle one of its splits
        chosen, _ = best_of([some[len(some) // 2] for some in by_format.values()])
    split, offer = best_of(by_format[chosen.cache_dtype])
    ranks = _ranks(job, split, offer, statistics) if split.ranks else ()
    return _Choice(list(splits).index(split), offer.pairs, offer.pursued, tried, ranks)


def _tried(split: LatentTarget, offer: Allocation, error: float) -> dict[str, Any]:
    form = {} if split.cache_dtype is None else {"cache_dtype": split.cache_dtype}
    return {"rank": offer.rank, "frequencies": list(offer.pairs), **form, "output_error": error}


def _offers(split: LatentTarget, measured: list[Any], without_pairs: Allocation) -> list[Allocation]:
    count = split.spec.qk_rope_head_dim // 2
    return split.method.allocate(measured, count, without_pairs) if count else [without_pairs.keeping((), False)]


def _measured(job: Job, method: LatentMethod, splits: Sequence[LatentTarget], statistics: StatisticsOf) -> list[Any]:
    """The result of `method.measure` for each layer with RoPE."""
    plan, measure = job.plan, method.measure
    fewest = min(split.spec.qk_rope_head_dim for split in splits) // 2
    found: list[Any] = []
    if measure is None:
        return found
    layers = [layer for layer in range(plan.before.num_layers) if plan.family.rotary(layer)]
    with stage(job.progress, "measure", len(layers), "layer") as done:
        for layer in layers:
            path = job.work.steps / f"measured-{layer}.pt"
            with path.open("wb") as file:  # torch's own writer would hide a full disk behind its own error
                torch.save(measure(job.read_layer(layer)[1], statistics(layer), fewest), file)
            # Mapped, so that memory does not hold all layers at once. Only this run reads the file.
            found.append(torch.load(path, map_location="cpu", mmap=True, weights_only=False))
            path.unlink()
            done(1)
    return found


def _errors(job: Job, offers: Sequence[tuple[LatentTarget, Allocation]], statistics: StatisticsOf) -> list[float]:
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
            for i, (split, offer) in enumerate(offers):
                after = balance(job, split, before, split.method.factor(before, offer, measured), layer, fitted)
                after = refit(job, before, after, layer, fitted)
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
