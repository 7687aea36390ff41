"""One layer: the steps from the source's record to the result's, the tensors to write, and the note for conversion.json."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from attention.errors import Failure
from attention.forward import output_error
from attention.record import Attention, FactoredAttention, Record
from convert.calibration.refit import refitted
from convert.execute.job import Job
from convert.methods.balanced import balanced, balanced_heads
from convert.methods.blocks import Blocks
from convert.methods.latent import sized
from convert.methods.portable_norm import behind_norm, with_constant_norm
from convert.methods.statistics import Attended, Statistics
from convert.planning.targets import GroupedTarget
from eval.inputs.sealed import Content

_MEASURED = 1024  # tokens, on which the error of a layer's attention is measured
_UNEVEN = 0.02  # of the size of inputs behind their norm, which were one size but for its epsilon
_EXACT = 4  # bits: queries are fitted to latents of so many or more without their rounding


def as_stored(job: Job, layer: int, source: dict[str, torch.Tensor], after: Record, errors: dict[str, float]) -> Content:
    """A converted layer's tensors, by the names of the output class, and its note for conversion.json.

    The note has its index, its errors on the text, and the tensors that differ from those of the source.
    """
    tensors = job.plan.layout.join(after, job.spec, layer)
    converted = [name for name, tensor in tensors.items() if not _is_copy(tensor, source.get(name))]
    return {name: tensor.cpu() for name, tensor in tensors.items()}, {"layer": layer, **errors, "converted": converted}


def _is_copy(tensor: torch.Tensor, source: torch.Tensor | None) -> bool:
    if source is None or tensor.shape != source.shape:
        return False
    return tensor.data_ptr() == source.data_ptr() or torch.equal(tensor, source)


def changed(job: Job, before: Attention, layer: int, seen: Statistics) -> Record:
    """A layer's record after all steps that need no other layer.

    Args:
        job: The conversion.
        before: The source's layer.
        layer: Its index.
        seen: The statistics of its inputs.
    """
    target, after = job.plan.target, before
    if isinstance(target, GroupedTarget):
        if target.spec.num_kv_heads != before.num_kv_heads:
            after = target.method.merge(before, target.spec.num_kv_heads, seen)
        return adapted(job, before, after, seen)
    assert before.sinks is None, "no output class has a latent and sinks"
    latent = target.method.factor(before, job.choice.allocation(target, job.plan.rotary, layer), seen)
    if target.host.portable:
        assert seen.sample is not None, "the norm of a latent is fitted to text"
        latent = with_constant_norm(before, latent, seen.sample.to(before.k.device))
    fitted = adapted(job, before, latent, seen)
    assert isinstance(fitted, FactoredAttention)
    if target.spec.q_lora_rank is not None:
        fitted = _behind_norm(fitted, job.input_gain(layer), layer, seen)
    latent, size = balanced(fitted, seen), target.host.latent_size(target.spec.kv_lora_rank or 0)
    # A norm that divides it by its size lets scales cancel.
    return latent if size is None or latent.normalised else sized(latent, seen.second, size)


def adapted(job: Job, before: Attention, after: Record, seen: Statistics) -> Record:
    """A record that is fit for the format of its cache, and fitted to the source's.

    From here on its keys and values, in balanced coordinates, are rounded as the target's cache rounds them. Where the class
    does more with those of heads than records say, or nothing shows their sizes, they are only rounded.
    """
    form, text, sample = job.plan.target.rounding, job.plan.calibration, seen.sample if job.shows_attention else None
    if form is not None:
        if isinstance(after, FactoredAttention):
            after = balanced(replace(after, rounding=form), seen)
        elif sample is not None:
            after = balanced_heads(after, sample.to(after.k.device))
        after = replace(after, rounding=form)
    return _refitted(before, after, sample, seen.attended) if text and text.refit and sample is not None else after


def _refitted(before: Attention, after: Record, sample: Blocks, attended: Attended) -> Record:
    """Queries, keys and values, fitted to the source's.

    They are fitted to keys and values as the cache rounds them. Latents in four bits or more, or in bits that differ, are not
    rounded for this: layers would err less, and whole models more (docs/notes/fits.md).
    """
    form = after.rounding
    exact = form is not None and isinstance(after, FactoredAttention) and (form.bits >= _EXACT or bool(form.classes))
    start = replace(after, rounding=None) if exact else after
    return replace(refitted(before, start, sample.to(before.k.device), attended), rounding=form)


def _behind_norm(after: FactoredAttention, gain: torch.Tensor, layer: int, seen: Statistics) -> FactoredAttention:
    """Queries that read the input without the gains `[E]` of its norm."""
    assert seen.sample is not None, "portable results need text"
    after, spread = behind_norm(after, gain, seen.sample)
    if spread > _UNEVEN:
        raise Failure(
            f"behind the norm of layer {layer}'s input, tokens differ in size by {spread:.1%} (root mean square), and "
            f"another norm of queries would undo that; at most {_UNEVEN:.0%} is allowed",
            hint="leave out --engine llama.cpp: embeddings are so small that the norm's epsilon matters, or gains are zero",
        )
    return after


def error_of(job: Job, before: Attention, after: Record, seen: Statistics) -> dict[str, float]:
    """Measure the error of the attention's output on a part of the text; {} without one, or where it is not finite."""
    if seen.sample is None or not job.shows_attention:
        return {}
    error = output_error(before, after, seen.sample.spread(_MEASURED).to(before.k.device).blocks)
    return {"output_error": error} if math.isfinite(error) else {}
