"""What happens to a layer before it is fitted to outputs: one function for each kind of target, and the steps that it takes."""

from __future__ import annotations

from dataclasses import replace

from attention.errors import Failure
from attention.formats import rounding_of
from attention.record import Attention, FactoredAttention, Record
from convert.calibration.refit import refitted
from convert.execute.job import Job
from convert.methods.balanced import balanced, balanced_heads
from convert.methods.latent import Allocation, sized
from convert.methods.portable_norm import behind_norm, with_constant_norm
from convert.methods.statistics import Statistics
from convert.planning.targets import GroupedTarget, LatentTarget

_UNEVEN = 0.02  # of the size of inputs behind their norm, which were one size but for its epsilon
_EXACT = 4  # bits: queries are fitted to latents of so many or more without their rounding


def grouped(job: Job, target: GroupedTarget, before: Attention, seen: Statistics) -> Record:
    """A layer with fewer KV heads.

    Args:
        job: The conversion.
        target: Its target.
        before: The source's layer.
        seen: The statistics of its inputs.
    """
    groups = target.spec.num_kv_heads
    after = before if groups == before.num_kv_heads else target.method.merge(before, groups, seen)
    return refit(job, before, balance(job, after, seen), seen)


def latent(
    job: Job, target: LatentTarget, allocation: Allocation, before: Attention, layer: int, seen: Statistics
) -> FactoredAttention:
    """A layer with a latent.

    Args:
        job: The conversion.
        target: Its target.
        allocation: The layer's rank and the frequencies that it keeps.
        before: The source's layer.
        layer: Its index.
        seen: The statistics of its inputs.
    """
    assert before.sinks is None, "no output class has a latent and sinks"
    after: Record = target.method.factor(before, allocation, seen)
    if target.host.portable:
        after = _constant_norm(before, after, seen)
    after = refit(job, before, balance(job, after, seen), seen)
    if target.spec.q_lora_rank is not None:
        after = _behind_norm(job, after, layer, seen)
    return _scaled(target.host.latent_size(target.spec.kv_lora_rank or 0), after, seen)


def refit(job: Job, before: Attention, after: Record, statistics: Statistics) -> Record:
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


def balance(job: Job, after: Record, statistics: Statistics) -> Record:
    """Keys and values in balanced coordinates, and rounded from here on as the target's cache rounds them, if it does.

    Where the class does more with them than records say, or nothing shows their sizes, those of heads are only rounded.
    """
    sample, form = statistics.sample, rounding_of(job.plan.target.cache_dtype)
    if form is None:
        return after
    if isinstance(after, FactoredAttention):
        return balanced(replace(after, rounding=form), statistics)
    if sample is not None and job.shows_attention:
        after = balanced_heads(after, sample.to(after.k.device))
    return replace(after, rounding=form)


def _constant_norm(before: Attention, after: Record, statistics: Statistics) -> Record:
    """A latent whose norm is nearly constant, for classes that have no place for biases."""
    assert isinstance(after, FactoredAttention)
    assert statistics.sample is not None, "the norm of a latent is fitted to text"
    return with_constant_norm(before, after, statistics.sample.to(before.k.device))


def _behind_norm(job: Job, after: Record, layer: int, statistics: Statistics) -> Record:
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


def _scaled(size: float | None, after: Record, statistics: Statistics) -> FactoredAttention:
    """A latent whose channels are balanced, at the size that the class's norm needs."""
    assert isinstance(after, FactoredAttention)
    after = balanced(after, statistics)
    # A norm that divides it by its size lets scales cancel.
    return after if size is None or after.normalised else sized(after, statistics.second, size)
