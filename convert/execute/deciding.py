"""What is decided for all layers together, before the first is changed: their sizes, and which frequencies they keep.

Decisions are values that are passed on. What the work directory keeps of them serves a resumed run alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from attention.errors import Failure
from attention.forward import output_error
from attention.record import Attention, Record
from attention.rope import Rotary
from convert.calibration.refit import refitted_queries
from convert.checkpoint.workdir import WorkDirectory
from convert.execute.job import Job
from convert.families.base import hides_logits
from convert.methods.latent import Allocation, LatentMethod
from convert.methods.statistics import Statistics
from convert.planning.base import Plan
from convert.planning.targets import GroupedTarget, LatentTarget
from eval.progress import stage

_TRIED_LAYERS = 4

Change = Callable[[Attention, int, Statistics], tuple[Attention, Record]]
StatisticsOf = Callable[[int], Statistics]


@dataclass(frozen=True)
class Decision:
    """How all layers are changed.

    Attributes:
        plan: The plan, of whose splits of the cache one has been chosen.
        change: `(record, layer, statistics) -> the record with its heads in the order of the result, and that of the result`;
            None where nothing changes.
        rotary: How the rotary key of MLA rotates, in every layer.
        found: What was decided on the way, for conversion.json.
    """

    plan: Plan
    change: Change | None = None
    rotary: Rotary | None = None
    found: dict[str, Any] = field(default_factory=dict)


def decide(job: Job, statistics: StatisticsOf) -> Decision:
    """Find out what the plan's method has to know of the whole model, and bind it to that.

    Raises:
        Failure: Weights or activations are not finite.
    """
    plan, target = job.plan, job.plan.target
    if target.copies:
        return Decision(plan)
    if isinstance(target, GroupedTarget):
        return Decision(plan, _refitting(job, target.change))
    return _decide_latent(job, target, statistics)


def _decide_latent(job: Job, target: LatentTarget, statistics: StatisticsOf) -> Decision:
    rotary = _rotary(job.plan)
    choice = _Choice.recalled(job.work)
    if choice is None:
        choice = _choose(job, target.splits or (target,), rotary, statistics)
        job.work.remember("decision", asdict(choice))
    chosen = (target.splits or (target,))[choice.split]
    allocation = choice.allocation(chosen.allocation(rotary))

    def change(before: Attention, layer: int, known: Statistics) -> tuple[Attention, Record]:
        return chosen.change(allocation, before, known)

    tried = {"rotary_frequencies_tried": choice.tried} if choice.tried else {}
    found = {"rotary_frequencies": list(choice.pairs), **tried}
    plan = job.plan.choosing(chosen) if target.splits else job.plan
    return Decision(plan, _refitting(job, change), rotary.select(list(choice.pairs), "interleaved"), found)


@dataclass(frozen=True)
class _Choice:
    """One of the candidates of a latent's layout.

    Attributes:
        split: Which of the target's splits.
        pairs: The frequencies that go on rotating.
        pursued: Whether they were found by pursuit.
        tried: Every candidate and its error on the text; empty where there was one candidate.
    """

    split: int
    pairs: tuple[int, ...]
    pursued: bool
    tried: list[dict[str, Any]]

    @classmethod
    def recalled(cls, work: WorkDirectory) -> _Choice | None:
        """What an interrupted run decided, or None."""
        found = work.recall("decision")
        if found is None:
            return None
        try:
            return cls(int(found["split"]), tuple(found["pairs"]), bool(found["pursued"]), list(found["tried"]))
        except (KeyError, TypeError, ValueError):  # not what this version keeps: decide again
            return None

    def allocation(self, without_pairs: Allocation) -> Allocation:
        return without_pairs.keeping(self.pairs, self.pursued)


def _choose(job: Job, splits: Sequence[LatentTarget], rotary: Rotary, statistics: StatisticsOf) -> _Choice:
    method = splits[0].method
    measured = _measured(job, method, splits, statistics)
    offers = [
        (index, allocation)
        for index, split in enumerate(splits)
        for allocation in method.allocate(measured, split.spec.qk_rope_head_dim // 2, split.allocation(rotary))
    ]
    tried = len(offers) > 1 and job.text is not None
    errors = _errors(job, method, [offer for _, offer in offers], statistics) if tried else [0.0] * len(offers)
    if not all(map(math.isfinite, errors)):
        raise Failure(
            f"attention outputs on the calibration text overflow: relative errors of {len(errors)} candidates are {errors}",
            hint="the source's weights are extreme; does `convert eval` of it work?",
        )
    best = min(range(len(offers)), key=errors.__getitem__)
    rows = [
        {"rank": offer.rank, "frequencies": list(offer.pairs), "output_error": error}
        for (_, offer), error in zip(offers, errors, strict=True)
    ]
    split, offer = offers[best]
    return _Choice(split, offer.pairs, offer.pursued, rows if tried else [])


def _rotary(plan: Plan) -> Rotary:
    """The rotary embedding of the layers that have one."""
    return next(rotary for layer in range(plan.before.num_layers) if (rotary := plan.family.rotary(plan.source.config, layer)))


def _measured(job: Job, method: LatentMethod, splits: Sequence[LatentTarget], statistics: StatisticsOf) -> list[Any]:
    """What the method has to know of each layer with RoPE."""
    plan, measure = job.plan, method.measure
    fewest = min(split.spec.qk_rope_head_dim for split in splits) // 2
    found: list[Any] = []
    if measure is None:
        return found
    layers = [layer for layer in range(plan.before.num_layers) if plan.family.rotary(plan.source.config, layer)]
    with stage(job.progress, "measure", len(layers), "layer") as done:
        for layer in layers:
            path = job.work.survey / f"measured-{layer}.pt"
            with path.open("wb") as file:  # torch's own writer would hide a full disk in an error of its own
                torch.save(measure(job.read_layer(layer)[1], statistics(layer), fewest), file)
            # Mapped: of many layers together memory holds what is being read. Only this run reads the file.
            found.append(torch.load(path, map_location="cpu", mmap=True, weights_only=False))
            path.unlink()
            done(1)
    return found


def _errors(job: Job, method: LatentMethod, offers: Sequence[Allocation], statistics: StatisticsOf) -> list[float]:
    """What each offer changes of the attention's outputs on the text: mean over layers spread evenly.

    Refitted as they will be, on the other half of the sample: before that, offers rank differently.
    """
    layers = job.plan.before.num_layers
    count = min(layers, _TRIED_LAYERS)
    tried_layers = sorted({(2 * i + 1) * layers // (2 * count) for i in range(count)})
    errors = [0.0] * len(offers)
    with stage(job.progress, "try", len(offers) * len(tried_layers), "candidate") as done:
        for layer in tried_layers:
            before, known = job.read_layer(layer)[1], statistics(layer).to(job.device)
            assert known.sample is not None
            tried, other = known.sample[::2], known.sample[1::2] if len(known.sample) > 1 else known.sample
            for i, offer in enumerate(offers):
                after = _refitted(job, before, method.factor(before, offer, known), other)
                errors[i] += output_error(before, after, tried) / count
                done(1)
    return errors


def _refitting(job: Job, change: Change) -> Change:
    """The same change, followed by the refit of queries where the plan wants it."""

    def refitted(before: Attention, layer: int, known: Statistics) -> tuple[Attention, Record]:
        before, after = change(before, layer, known)
        return before, _refitted(job, before, after, known.sample)

    return refitted


def _refitted(job: Job, before: Attention, after: Record, sample: torch.Tensor | None) -> Record:
    text, traits = job.text, job.plan.family.traits(job.plan.source.config)
    if text is None or not text.plan.refit or sample is None or hides_logits(traits, text.plan.context):
        return after
    return refitted_queries(before, after, sample.to(job.device))
