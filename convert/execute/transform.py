"""How a plan changes its layers: the method, with what it has to know of the whole model first.

survey → allocate → one function per layer; or, if layers are to be fitted behind the ones before them, all of them in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attention.errors import Failure
from attention.forward import output_error
from attention.record import Attention, Record
from attention.rope import Rotary
from convert.calibration.refit import refitted_queries
from convert.calibration.survey import survey
from convert.checkpoint.shelf import Shelf
from convert.execute.job import Job
from convert.execute.layer import Layer
from convert.execute.sequence import Change, in_sequence
from convert.families.base import hides_logits
from convert.methods.grouped import Draw, GroupedMethod, reordered
from convert.methods.latent import LatentMethod, Size
from convert.methods.statistics import Statistics

_TRIED_LAYERS = 4


@dataclass(frozen=True)
class Transform:
    """What is done to each layer.

    Attributes:
        layer: Layer → what is written of it.
        rotary: How the rotary key of MLA turns, in every layer.
        found: What was decided on the way, for conversion.json.
    """

    layer: Callable[[int], Layer]
    rotary: Rotary | None = None
    found: dict[str, Any] = field(default_factory=dict)


def transform_of(job: Job) -> Transform:
    """Find out what the plan's method has to know, and bind it to that.

    Raises:
        Failure: Weights or activations are not finite.
    """
    statistics = _statistics(job)
    change, rotary, found = _merging(job) if isinstance(job.plan.method, GroupedMethod) else _factoring(job, statistics)
    if job.plan.calibration and job.plan.calibration.in_sequence:
        return Transform(in_sequence(job, change, rotary, statistics), rotary, found)

    def layer(index: int) -> Layer:
        tensors, before = job.read_layer(index)
        return Layer.of(job, index, tensors, *change(before, index, statistics(index)))

    return Transform(layer, rotary, found)


def decided(job: Job) -> Job:
    """The job with its plan's split of the cache decided by the text, where the plan leaves that open."""
    if not job.plan.splits:
        return job
    return replace(job, plan=job.plan.splits[_decision(job, _statistics(job))["split"]])


def _decision(job: Job, statistics: Callable[[int], Statistics]) -> dict[str, Any]:
    """Which split, and which frequencies turn; kept in the work directory, so that a resumed run decides the same."""
    known: dict[str, Any] | None = job.work.recall("decision")
    if known is not None:
        return known
    plans, method = job.plan.splits or (job.plan,), job.plan.method
    assert isinstance(method, LatentMethod)
    rotary, found_by_layer = _surveyed(job, method, statistics)
    offers = [
        (index, size)
        for index, plan in enumerate(plans)
        for size in method.allocate(
            found_by_layer, plan.target.qk_rope_head_dim // 2, Size(plan.rank, (), plan.freqfold, rotary)
        )
    ]
    tried = len(offers) > 1 and job.tokens is not None
    errors = _errors(job, method, [size for _, size in offers], statistics) if tried else [0.0] * len(offers)
    if not all(map(math.isfinite, errors)):
        raise Failure(
            f"attention outputs on the calibration text overflow: relative errors of {len(errors)} candidates are {errors}",
            hint="the source's weights are extreme; does `convert eval` of it work?",
        )
    best = min(range(len(offers)), key=errors.__getitem__)
    (split, size), pairs = offers[best], [{"rank": s.rank, "frequencies": list(s.pairs)} for _, s in offers]
    decision = {
        "split": split,
        "pairs": list(size.pairs),
        "pursued": size.pursued,
        "tried": [pair | {"output_error": error} for pair, error in zip(pairs, errors, strict=True)] if tried else [],
    }
    job.work.remember("decision", decision)
    return decision


def _statistics(job: Job) -> Callable[[int], Statistics]:
    """What is known of each layer's input: surveyed, if there is text."""
    if job.tokens is None:
        return job.assumed
    plan, spool = job.plan, job.surveys / "source-inputs"
    stream = job.stream(plan.source.config, plan.family.module, job.reader.__getitem__, spool)
    return survey(stream, Shelf(job.surveys, "source"), job.quiet)


def _merging(job: Job) -> tuple[Change, None, dict[str, Any]]:
    plan, method = job.plan, job.plan.method
    assert isinstance(method, GroupedMethod)
    groups, spread = plan.target.num_kv_heads, getattr(plan.source.config, "initializer_range", 0.02)

    def change(before: Attention, layer: int, statistics: Statistics) -> tuple[Attention, Record]:
        if groups == before.num_kv_heads:
            return before, before
        if plan.grouping == "similar" and method.partition:
            before = reordered(before, method.partition(before, groups, statistics))
        # Seeded per layer, so that a resumed run draws what an uninterrupted one would have.
        draw = Draw(torch.Generator().manual_seed(plan.seed * 100_003 + layer), spread)
        return before, _refitted(job, before, method.merge(before, groups, draw, statistics), statistics.sample)

    return change, None, {}


def _factoring(job: Job, statistics: Callable[[int], Statistics]) -> tuple[Change, Rotary, dict[str, Any]]:
    plan, method = job.plan, job.plan.method
    assert isinstance(method, LatentMethod)
    decision, rotary = _decision(job, statistics), _rotary(job)
    pairs: list[int] = decision["pairs"]
    chosen = Size(plan.rank, tuple(pairs), plan.freqfold, rotary, decision["pursued"])

    def change(before: Attention, layer: int, statistics: Statistics) -> tuple[Attention, Record]:
        return before, _refitted(job, before, method.factor(before, chosen, statistics), statistics.sample)

    tried = {"rotary_frequencies_tried": decision["tried"]} if decision["tried"] else {}
    return change, rotary.select(pairs, "interleaved"), {"rotary_frequencies": pairs, **tried}


def _turning(job: Job) -> list[int]:
    plan = job.plan
    return [layer for layer in range(plan.before.num_layers) if plan.family.rotary(plan.source.config, layer)]


def _rotary(job: Job) -> Rotary:
    """How the layers that turn do."""
    rotary = job.plan.family.rotary(job.plan.source.config, _turning(job)[0])
    assert rotary is not None
    return rotary


def _surveyed(job: Job, method: LatentMethod, statistics: Callable[[int], Statistics]) -> tuple[Rotary, list[Any]]:
    """How layers turn, and what the method has to know of each that does."""
    plan, look = job.plan, method.survey
    fewest = min(one.target.qk_rope_head_dim for one in plan.splits or [plan]) // 2
    found: list[Any] = []
    if look is None:
        return _rotary(job), found
    for layer in _turning(job):
        path = job.work.survey / f"found-{layer}.pt"
        with path.open("wb") as file:  # torch's own writer would hide a full disk in an error of its own
            torch.save(look(job.read_layer(layer)[1], statistics(layer), fewest), file)
        # Mapped: of many layers together memory holds what is being read. Only this run reads the file.
        found.append(torch.load(path, map_location="cpu", mmap=True, weights_only=False))
        path.unlink()
    return _rotary(job), found


def _errors(job: Job, method: LatentMethod, sizes: Sequence[Size], statistics: Callable[[int], Statistics]) -> list[float]:
    """What each size changes of the attention's outputs on the text: mean over layers spread evenly.

    Refitted as they will be, on the other half of the sample: before that, sizes rank differently.
    """
    layers = job.plan.before.num_layers
    count = min(layers, _TRIED_LAYERS)
    errors = [0.0] * len(sizes)
    for layer in sorted({(2 * i + 1) * layers // (2 * count) for i in range(count)}):
        before, known = job.read_layer(layer)[1], statistics(layer).to(job.device)
        assert known.sample is not None
        tried, other = known.sample[::2], known.sample[1::2] if len(known.sample) > 1 else known.sample
        for i, size in enumerate(sizes):
            after = _refitted(job, before, method.factor(before, size, known), other)
            errors[i] += output_error(before, after, tried) / count
    return errors


def _refitted(job: Job, before: Attention, after: Record, sample: torch.Tensor | None) -> Record:
    calibration, traits = job.plan.calibration, job.plan.family.traits(job.plan.source.config)
    if calibration is None or not calibration.refit or sample is None or hides_logits(traits, calibration.context or 0):
        return after
    return refitted_queries(before, after, sample.to(job.device))
