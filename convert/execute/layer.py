"""One converted layer: the tensors to write and the note for conversion.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attention.forward import output_error
from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.execute.deciding import Choice
from convert.execute.job import Job
from convert.execute.steps import grouped, latent
from convert.methods.blocks import Blocks
from convert.methods.statistics import Statistics
from convert.planning.base import Plan
from convert.planning.targets import GroupedTarget

_MEASURED = 1024  # tokens, on which the error of a layer's attention is measured


@dataclass(frozen=True)
class Layer:
    """A converted layer, with the tensor names of the output class.

    Attributes:
        tensors: The tensors of its attention by name.
        note: For conversion.json: its index, errors on the text, and the tensors that differ from those of the source.
    """

    tensors: dict[str, torch.Tensor]
    note: dict[str, Any]

    @classmethod
    def of(
        cls, plan: Plan, spec: AttentionSpec, index: int, source: dict[str, torch.Tensor], after: Record, **more: Any
    ) -> Layer:
        """Made from the result's sizes, a layer's source tensors, and the result's record; the note includes `more`."""
        tensors = plan.target.host.layout(plan.family).join(after, spec, index)
        converted = [name for name, tensor in tensors.items() if not _is_copy(tensor, source.get(name))]
        note = {"layer": index, **more, "converted": converted}
        return cls({name: tensor.cpu() for name, tensor in tensors.items()}, note)


def _is_copy(tensor: torch.Tensor, source: torch.Tensor | None) -> bool:
    if source is None or tensor.shape != source.shape:
        return False
    return tensor.data_ptr() == source.data_ptr() or torch.equal(tensor, source)


def changed(job: Job, choice: Choice, before: Attention, layer: int, seen: Statistics) -> Record:
    """A layer's record after all steps that need no other layer; `seen` has the statistics of its inputs."""
    target = job.plan.target
    if isinstance(target, GroupedTarget):
        return grouped(job, target, before, seen)
    return latent(job, target, choice.allocation(job.plan, layer), before, layer, seen)


def error_of(job: Job, before: Attention, after: Record, sample: Blocks | None) -> dict[str, float]:
    """Measure the error of the attention's output on a part of the text; {} where records do not show the attention."""
    if sample is None or not job.shows_attention:
        return {}
    error = output_error(before, after, sample.spread(_MEASURED).to(job.device).blocks)
    return {"output_error": error} if math.isfinite(error) else {}
