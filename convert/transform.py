"""How a plan changes one layer: its method, with what that has to know of the whole model first.

For a latent: survey → allocate, and the survey once more through converted layers if errors are to be propagated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from attention.errors import Failure
from attention.rope import Rotary
from convert.allocate import pairs_by_loss, pairs_by_stride
from convert.checkpoint import Reader, require_finite
from convert.methods.grouped import Draw, GroupedMethod
from convert.methods.latent import LatentMethod, Size
from convert.plan import Plan
from convert.record import Attention, LatentAttention, Statistics
from convert.stream import LayerStream
from convert.survey import Shelf, survey
from convert.workdir import WorkDirectory

Change = Callable[[Attention, int], Attention | LatentAttention]


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


def transform_of(
    plan: Plan, reader: Reader, work: WorkDirectory, blocks: torch.Tensor | None, device: torch.device, quiet: bool
) -> Transform:
    """Find out what the plan's method has to know, and bind it to that.

    Args:
        plan: The plan.
        reader: Of its source.
        work: Where surveys lie.
        blocks: `[n, T]` token ids to calibrate on, if the plan does.
        device: Where to compute.
        quiet: No progress bars.

    Raises:
        Failure: Weights or activations are not finite.
    """
    if isinstance(plan.method, GroupedMethod):
        return Transform(_merge(plan, plan.method))
    return _latent(plan, plan.method, reader, work, blocks, device, quiet)


def read_layer(plan: Plan, reader: Reader, layer: int, device: torch.device) -> tuple[dict[str, torch.Tensor], Attention]:
    """The tensors of a layer's attention under their names, and their record."""
    tensors = {name: reader[name].to(device) for name in plan.family.shapes(plan.source.config, layer)}
    for name, tensor in tensors.items():
        require_finite(name, tensor)
    return tensors, plan.family.split(tensors, plan.source.config, layer)


def _merge(plan: Plan, method: GroupedMethod) -> Change:
    groups, spread = plan.target.num_kv_heads, getattr(plan.source.config, "initializer_range", 0.02)

    def change(before: Attention, layer: int) -> Attention:
        if groups == before.num_kv_heads:
            return before
        # Seeded per layer, so that a resumed run draws what an uninterrupted one would have.
        return method.merge(before, groups, Draw(torch.Generator().manual_seed(plan.seed * 100_003 + layer), spread))

    return change


def _latent(
    plan: Plan,
    method: LatentMethod,
    reader: Reader,
    work: WorkDirectory,
    blocks: torch.Tensor | None,
    device: torch.device,
    quiet: bool,
) -> Transform:
    layers = plan.before.num_layers
    shelf = Shelf(work.survey, "source") if blocks is not None else None
    if blocks is not None and shelf is not None:
        names = [plan.family.shapes(plan.source.config, layer) for layer in range(layers)]
        trusted = plan.source.trust_remote_code
        stream = LayerStream(plan.source.config, _modules(names), reader.__getitem__, blocks, shelf.spool, device, trusted)
        survey(stream, shelf, layers, lambda layer: None, quiet)
    statistics = _statistics(shelf)
    rotary = plan.family.rotary(plan.source.config, 0)
    assert rotary is not None, "hosts refuse models without positions"
    if method.losses is None:
        pairs = pairs_by_stride(plan.target.qk_rope_head_dim, rotary.dims)
    else:
        records = (read_layer(plan, reader, layer, device)[1] for layer in range(layers))
        losses = [method.losses(record, statistics(layer)).cpu() for layer, record in enumerate(records)]
        pairs = pairs_by_loss(losses, plan.target.qk_rope_head_dim // 2)
    size, kept = Size(plan.rank, pairs, plan.freqfold), rotary.select(list(pairs), "interleaved")
    if blocks is not None and plan.calibration and plan.calibration.propagate:
        change = _factor(method, size, statistics)
        statistics = _statistics(_propagate(plan, reader, work, blocks, device, quiet, change, kept))
    return Transform(_factor(method, size, statistics), kept, {"rotary_frequencies": list(pairs)})


def _statistics(shelf: Shelf | None) -> Callable[[int], Statistics | None]:
    return shelf.get if shelf else lambda layer: None


def _factor(method: LatentMethod, size: Size, statistics: Callable[[int], Statistics | None]) -> Change:
    def change(before: Attention, layer: int) -> LatentAttention:
        try:
            return method.factor(before, size, statistics(layer))
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # torch's stubs forget it
            raise Failure(
                f"a decomposition of layer {layer} failed: {' '.join(str(error).split())[:120]}",
                hint="its weights or activations are extreme; please report the model",
            ) from None

    return change


def _propagate(
    plan: Plan,
    reader: Reader,
    work: WorkDirectory,
    blocks: torch.Tensor,
    device: torch.device,
    quiet: bool,
    change: Change,
    kept: Rotary,
) -> Shelf:
    """Statistics of each layer's input behind converted layers, which `change` makes one by one from these statistics."""
    from transformers import AutoConfig

    layers, shelf = plan.before.num_layers, Shelf(work.survey, "converted")
    converted: dict[str, torch.Tensor] = {}
    written = plan.host.config(plan.source.raw, plan.source.config, plan.target, kept)
    names = [plan.host.shapes(plan.family, plan.source.config, plan.target, layer) for layer in range(layers)]
    stream = LayerStream(
        AutoConfig.for_model(**written),
        _modules(names),
        lambda name: converted[name] if name in converted else reader[name],
        blocks,
        shelf.spool,
        device,
    )

    def convert(layer: int) -> None:
        _, before = read_layer(plan, reader, layer, device)
        converted.clear()
        converted.update(plan.host.tensors(plan.family, change(before, layer), plan.target, layer))

    survey(stream, shelf, layers, convert, quiet)
    return shelf


def _modules(names: list[dict[str, tuple[int, ...]]]) -> list[str]:
    """The module path of each layer's attention, from its tensors' names: `….self_attn.q_proj.weight`."""
    return [next(iter(layer)).rsplit(".", 2)[0] for layer in names]
