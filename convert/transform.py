"""How a plan changes one layer: its method, with what that has to know of the whole model first.

For a latent: survey → allocate, and the survey once more through converted layers if errors are to be propagated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from attention.errors import Failure
from attention.rope import Rotary
from convert.allocate import pairs_by_loss, pairs_by_stride
from convert.job import Job
from convert.methods.grouped import Draw, GroupedMethod
from convert.methods.latent import LatentMethod, Size
from convert.plan import Plan
from convert.record import Attention, FactoredAttention, Statistics
from convert.stream import LayerStream
from convert.survey import Shelf, survey

Change = Callable[[Attention, int], Attention | FactoredAttention]


@dataclass(frozen=True)
class Transform:
    """What is done to each layer.

    Attributes:
        change: `(record, layer) -> record of the result`.
        rotary: How the rotary key of MLA turns, in every layer.
        found: What was decided on the way, for conversion.json.
    """

    change: Change
    rotary: Rotary | None = None
    found: dict[str, Any] = field(default_factory=dict)


def transform_of(job: Job) -> Transform:
    """Find out what the plan's method has to know, and bind it to that.

    Raises:
        Failure: Weights or activations are not finite.
    """
    if isinstance(job.plan.method, GroupedMethod):
        return Transform(_merge(job.plan, job.plan.method))
    return _latent(job, job.plan.method)


def _merge(plan: Plan, method: GroupedMethod) -> Change:
    groups, spread = plan.target.num_kv_heads, getattr(plan.source.config, "initializer_range", 0.02)

    def change(before: Attention, layer: int) -> Attention:
        if groups == before.num_kv_heads:
            return before
        # Seeded per layer, so that a resumed run draws what an uninterrupted one would have.
        return method.merge(before, groups, Draw(torch.Generator().manual_seed(plan.seed * 100_003 + layer), spread))

    return change


def _latent(job: Job, method: LatentMethod) -> Transform:
    plan, layers = job.plan, job.plan.before.num_layers
    statistics: Callable[[int], Statistics | None] = _survey(job).get if job.tokens else lambda layer: None
    turning = [layer for layer in range(layers) if plan.family.rotary(plan.source.config, layer)]
    rotary = plan.family.rotary(plan.source.config, turning[0])
    assert rotary is not None
    if method.losses is None:
        pairs = pairs_by_stride(plan.target.qk_rope_head_dim, rotary.dims)
    else:
        losses = [method.losses(job.read_layer(layer)[1], statistics(layer)).cpu() for layer in turning]
        pairs = pairs_by_loss(losses, plan.target.qk_rope_head_dim // 2)
    size, kept = Size(plan.rank, pairs, plan.freqfold, rotary), rotary.select(list(pairs), "interleaved")
    if plan.calibration and plan.calibration.propagate:
        behind = Shelf(job.work.survey, "converted")
        statistics = behind.get
        _propagate(job, _factor(method, size, statistics), kept, behind)
    return Transform(_factor(method, size, statistics), kept, {"rotary_frequencies": list(pairs)})


def _survey(job: Job) -> Shelf:
    """Statistics of the source."""
    plan, shelf = job.plan, Shelf(job.work.survey, "source")
    survey(_stream(job, plan.source.config, plan.family.module, job.reader.__getitem__, shelf), shelf, None, job.quiet)
    return shelf


def _factor(method: LatentMethod, size: Size, statistics: Callable[[int], Statistics | None]) -> Change:
    def change(before: Attention, layer: int) -> FactoredAttention:
        try:
            return method.factor(before, size, statistics(layer))
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # torch's stubs forget it
            raise Failure(
                f"a decomposition of layer {layer} failed: {' '.join(str(error).split())[:120]}",
                hint="its weights or activations are extreme; please report the model",
            ) from None

    return change


def _propagate(job: Job, change: Change, kept: Rotary, shelf: Shelf) -> None:
    """Fill the shelf behind converted layers, each of which `change` makes as soon as its own statistics lie there."""
    from transformers import AutoConfig

    plan = job.plan
    converted: dict[str, torch.Tensor] = {}

    def convert(layer: int) -> None:
        converted.clear()
        converted.update(plan.host.tensors(plan.family, change(job.read_layer(layer)[1], layer), plan.target, layer))

    def read(name: str) -> torch.Tensor:
        return converted[name] if name in converted else job.reader[name]

    config = AutoConfig.for_model(**plan.host.config(plan.source.raw, plan.source.config, plan.target, kept))
    survey(_stream(job, config, partial(plan.host.module, plan.family), read, shelf), shelf, convert, job.quiet)


def _stream(
    job: Job, config: Any, module: Callable[[int], str], read: Callable[[str], torch.Tensor], shelf: Shelf
) -> LayerStream:
    assert job.blocks is not None
    modules = [module(layer) for layer in range(job.plan.before.num_layers)]
    return LayerStream(config, modules, read, job.blocks, shelf.spool, job.device, job.plan.source.trust_remote_code)
