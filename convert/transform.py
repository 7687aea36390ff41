"""How a plan changes its layers: the method, with what it has to know of the whole model first.

survey → allocate → one function per layer; or, if layers are to be fitted behind the ones before them, all of them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attention.errors import Failure
from attention.rope import Rotary
from convert.forward import output_error
from convert.job import Job
from convert.layer import Layer
from convert.methods.grouped import Draw, GroupedMethod, reordered
from convert.methods.latent import LatentMethod, Size
from convert.record import Attention, Record, Statistics
from convert.refit import refitted_queries
from convert.sequence import Change, in_sequence
from convert.survey import Shelf, survey

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
    change = _explained(change)
    if job.plan.calibration and job.plan.calibration.in_sequence:
        return Transform(in_sequence(job, change, rotary, statistics), rotary, found)

    def layer(index: int) -> Layer:
        tensors, before = job.read_layer(index)
        return Layer.of(job, index, tensors, *change(before, index, statistics(index)))

    return Transform(layer, rotary, found)


def decided(job: Job) -> Job:
    """The job with its plan's split of the cache decided by the text, where the plan leaves that open."""
    plans, method = job.plan.splits, job.plan.method
    if not plans or not isinstance(method, LatentMethod):
        return job
    statistics = _statistics(job)
    rotary, found = _surveyed(job, method, statistics)
    offers = [
        (plan, size)
        for plan in plans
        for size in method.allocate(found, plan.target.qk_rope_head_dim // 2, Size(plan.rank, (), plan.freqfold, rotary))
    ]
    errors = _errors(job, method, [size for _, size in offers], statistics)
    return replace(job, plan=offers[min(range(len(offers)), key=errors.__getitem__)][0])


def _statistics(job: Job) -> Callable[[int], Statistics]:
    """What is known of each layer's input: surveyed, if there is text."""
    if job.tokens is None:
        return job.assumed
    plan, shelf = job.plan, Shelf(job.surveys, "source")
    stream = job.stream(plan.source.config, plan.family.module, job.reader.__getitem__, shelf.spool)
    survey(stream, shelf, job.quiet)
    return shelf.get


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
        return before, _refitted(job, before, method.merge(before, groups, draw, statistics), statistics)

    return change, None, {}


def _factoring(job: Job, statistics: Callable[[int], Statistics]) -> tuple[Change, Rotary, dict[str, Any]]:
    plan, method = job.plan, job.plan.method
    assert isinstance(method, LatentMethod)
    rotary, found = _surveyed(job, method, statistics)
    size, count = Size(plan.rank, (), plan.freqfold, rotary), plan.target.qk_rope_head_dim // 2
    chosen, errors = _best(job, method, method.allocate(found, count, size), statistics)

    def change(before: Attention, layer: int, statistics: Statistics) -> tuple[Attention, Record]:
        return before, _refitted(job, before, method.factor(before, chosen, statistics), statistics)

    tried = {"rotary_frequencies_tried": errors} if errors else {}
    return change, rotary.select(list(chosen.pairs), "interleaved"), {"rotary_frequencies": list(chosen.pairs), **tried}


def _surveyed(job: Job, method: LatentMethod, statistics: Callable[[int], Statistics]) -> tuple[Rotary, list[Any]]:
    """How layers turn, and what the method has to know of each that does."""
    plan, look, config = job.plan, method.survey, job.plan.source.config
    turning = [layer for layer in range(plan.before.num_layers) if plan.family.rotary(config, layer)]
    rotary = plan.family.rotary(config, turning[0])
    assert rotary is not None
    fewest = min(one.target.qk_rope_head_dim for one in plan.splits or [plan]) // 2
    return rotary, [look(job.read_layer(layer)[1], statistics(layer), fewest) for layer in turning] if look else []


def _best(
    job: Job, method: LatentMethod, sizes: Sequence[Size], statistics: Callable[[int], Statistics]
) -> tuple[Size, list[dict[str, Any]]]:
    """The size of least error on the text; the first if there is no text.

    Returns:
        It, and what each led to if there were several.
    """
    if len(sizes) == 1 or job.tokens is None:
        return sizes[0], []
    errors = _errors(job, method, sizes, statistics)
    best = min(range(len(sizes)), key=errors.__getitem__)
    return sizes[best], [{"frequencies": list(s.pairs), "output_error": e} for s, e in zip(sizes, errors, strict=True)]


def _errors(job: Job, method: LatentMethod, sizes: Sequence[Size], statistics: Callable[[int], Statistics]) -> list[float]:
    """What each size changes of the attention's outputs on the text: mean over layers spread evenly."""
    layers = job.plan.before.num_layers
    count = min(layers, _TRIED_LAYERS)
    errors = [0.0] * len(sizes)
    for layer in sorted({(2 * i + 1) * layers // (2 * count) for i in range(count)}):
        before, known = job.read_layer(layer)[1], statistics(layer).to(job.device)
        assert known.sample is not None
        for i, size in enumerate(sizes):
            errors[i] += output_error(before, method.factor(before, size, known), known.sample[::2]) / count
    return errors


def _refitted(job: Job, before: Attention, after: Record, statistics: Statistics) -> Record:
    calibration, sample = job.plan.calibration, statistics.sample
    if calibration is None or not calibration.refit or sample is None:
        return after
    return refitted_queries(before, after, sample.to(job.device))


def _explained(change: Change) -> Change:
    def explained(before: Attention, layer: int, statistics: Statistics) -> tuple[Attention, Record]:
        try:
            return change(before, layer, statistics)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # torch's stubs forget it
            raise Failure(
                f"a decomposition of layer {layer} failed: {' '.join(str(error).split())[:120]}",
                hint="its weights or activations are extreme; please report the model",
            ) from None

    return explained
