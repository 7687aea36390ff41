"""What happens to a layer before it is fitted to outputs, in order: the method, then steps that change its result.

Each is a function of records and statistics, and knows nothing of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from attention.errors import Failure
from attention.formats import rounding_of
from attention.record import Attention, FactoredAttention, Record
from convert.calibration.refit import refitted
from convert.execute.job import Job
from convert.methods.balanced import balanced, balanced_heads
from convert.methods.latent import Allocation, sized
from convert.methods.portable_norm import behind_norm, with_constant_norm
from convert.methods.statistics import Statistics
from convert.planning.base import Plan
from convert.planning.targets import GroupedTarget, LatentTarget, Target

_UNEVEN = 0.02  # of the size of inputs behind their norm, which were one size but for its epsilon
_EXACT = 4  # bits: queries are fitted to latents of so many or more without their rounding

Method = Callable[[Attention, int, Statistics], Record]
Step = Callable[[Attention, Record, int, Statistics], Record]


@dataclass(frozen=True)
class Pipeline:
    """The steps of a layer.

    Attributes:
        method: `(source's record, layer, statistics) -> result's record`.
        steps: What follows by name, in order: `(source's record, result's record, layer, statistics) -> result's record`.
    """

    method: Method
    steps: Mapping[str, Step]

    def __call__(self, before: Attention, layer: int, statistics: Statistics) -> Record:
        after = self.method(before, layer, statistics)
        for step in self.steps.values():
            after = step(before, after, layer, statistics)
        return after


def grouped_pipeline(job: Job, target: GroupedTarget) -> Pipeline:
    """The steps to fewer KV heads."""
    steps: dict[str, Step] = {"balance": partial(balance, job, target), "refit": partial(refit, job)}
    return Pipeline(partial(merged, target), _named(job.plan, steps))


def latent_pipeline(job: Job, target: LatentTarget, allocation: Allocation, ranks: Sequence[int]) -> Pipeline:
    """The steps to a latent.

    Args:
        job: The conversion.
        target: Its target, with one of its splits chosen.
        allocation: What all layers share.
        ranks: The rank of each layer; empty if all have that of the allocation.
    """
    steps: dict[str, Step] = {
        "constant norm": _constant_norm,
        "balance": partial(balance, job, target),
        "refit": partial(refit, job),
        "queries behind a norm": partial(_behind_norm, job),
        "scale": partial(_scaled, target.host.latent_size(target.spec.kv_lora_rank or 0)),
    }
    return Pipeline(partial(factored, target, allocation, ranks), _named(job.plan.choosing(target), steps))


def _named(plan: Plan, steps: Mapping[str, Step]) -> dict[str, Step]:
    """Of these steps those that the plan names, in its order."""
    return {name: steps[name] for name in plan.layer_steps}


def merged(target: GroupedTarget, before: Attention, layer: int, statistics: Statistics) -> Record:
    """The KV heads of a layer, merged by the target's method."""
    groups = target.spec.num_kv_heads
    return before if groups == before.num_kv_heads else target.method.merge(before, groups, statistics)


def refit(job: Job, before: Attention, after: Record, layer: int, statistics: Statistics) -> Record:
    """Queries, keys and values, fitted to the source's, if the plan has a refit and the source shows where it looks.

    They are fitted to keys and values as the cache rounds them. Latents in four bits or more, or in bits that differ, are not
    rounded for this: layers would err less, and whole models more (docs/notes/fits.md).
    """
    if job.text is None or not job.text.calibration.refit or statistics.sample is None or not job.shows_attention:
        return after
    form = after.rounding
    exact = form is not None and isinstance(after, FactoredAttention) and (form.bits >= _EXACT or bool(form.classes))
    start = replace(after, rounding=None) if exact else after
    return replace(refitted(before, start, statistics.sample.to(job.device), statistics.attended), rounding=form)


def factored(
    target: LatentTarget, allocation: Allocation, ranks: Sequence[int], before: Attention, layer: int, statistics: Statistics
) -> Record:
    """Keys and values of a layer, factored by the target's method, with the frequencies and ranks of all layers chosen."""
    assert before.sinks is None, "no output class has a latent and sinks"
    own = replace(allocation, rank=ranks[layer]) if ranks else allocation
    return target.method.factor(before, own, statistics)


def balance(job: Job, target: Target, before: Attention, after: Record, layer: int, statistics: Statistics) -> Record:
    """Keys and values in balanced coordinates, and rounded from here on as the target's cache rounds them, if it does.

    Where the class does more with them than records say, or nothing shows their sizes, those of heads are only rounded.
    """
    sample, form = statistics.sample, rounding_of(target.cache_dtype)
    if form is None:
        return after
    if isinstance(after, FactoredAttention):
        return balanced(replace(after, rounding=form), statistics)
    if sample is not None and job.shows_attention:
        after = balanced_heads(after, sample.to(after.k.device))
    return replace(after, rounding=form)


def _constant_norm(before: Attention, after: Record, layer: int, statistics: Statistics) -> Record:
    """A latent whose norm is nearly constant, for classes that have no place for biases."""
    assert isinstance(after, FactoredAttention)
    assert statistics.sample is not None, "the norm of a latent is fitted to text"
    return with_constant_norm(before, after, statistics.sample.to(before.k.device))


def _behind_norm(job: Job, before: Attention, after: Record, layer: int, statistics: Statistics) -> Record:
    """Queries that read the input without the gains of its norm."""
    assert isinstance(after, FactoredAttention)
    assert statistics.sample is not None, "portable results need text"
    after, spread = behind_norm(after, job.input_gain(layer), statistics.sample)
    if spread > _UNEVEN:
        raise Failure(
            f"behind the norm of layer {layer}'s input, tokens differ in size by {spread:.1%} (root mean square), and "
            f"another norm of queries would undo that; at most {_UNEVEN:.0%} is allowed",
            hint="leave out --engine llama.cpp: embeddings are so small that the norm's epsilon matters, or gains are zero",
        )
    return after


def _scaled(size: float | None, before: Attention, after: Record, layer: int, statistics: Statistics) -> Record:
    """A latent whose channels are balanced, at the size that the class's norm needs."""
    assert isinstance(after, FactoredAttention)
    after = balanced(after, statistics)
    # A norm that divides it by its size lets scales cancel.
    return after if size is None or after.normalised else sized(after, statistics.second, size)
