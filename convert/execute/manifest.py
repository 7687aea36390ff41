"""What a plan will write, known from file headers alone: units of tensors, checked against the config, dealt to shards.

It reads no weights; names, shapes and dtypes are all it sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.errors import Failure
from convert.checkpoint.reader import Reader, TensorInfo
from convert.planning.base import Plan


@dataclass(frozen=True)
class Unit:
    """Tensors that are written together: one that is copied, or (with `layer`) one layer's attention.

    Attributes:
        outputs: Name → what will be stored.
        layer: The decoder layer whose attention it is, or None.
    """

    outputs: dict[str, TensorInfo]
    layer: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.outputs.values())


def units_of(plan: Plan, reader: Reader) -> list[Unit]:
    """What will be written, in the source's order, checked against the headers of its files."""
    config = plan.source.config
    stored = getattr(torch, plan.output.dtype) if plan.output.dtype else None
    layer_of: dict[str, int] = {}
    for layer in range(plan.before.num_layers):
        expected = plan.family.shapes(config, layer)
        _check_layer(plan, reader, layer, expected)
        layer_of |= dict.fromkeys(expected, layer)
    _check_depth(plan, reader)
    tied = getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
    units: list[Unit] = []
    placed: set[int] = set()
    for name, info in reader.infos.items():
        # Buffers may be integers. What a class calls a weight is none.
        if not info.is_float and (name in layer_of or name.endswith(".weight")):
            kind = str(info.dtype).removeprefix("torch.")
            raise Failure(
                f"{name} holds {kind}, which is no weight without its scales",
                hint="convert the original checkpoint, in float32, bfloat16 or float16, then quantise",
            )
        layer_index = layer_of.get(name)
        if layer_index is not None:
            if layer_index not in placed:
                placed.add(layer_index)
                units.append(Unit(_layer_outputs(plan, reader, layer_index, stored), layer_index))
        elif not (tied and name in reader.aliases) and not plan.host.drops(name):  # a tied head is written once
            units.append(Unit({name: info.stored_as(stored)}))
    return units


def _check_layer(plan: Plan, reader: Reader, layer: int, expected: dict[str, tuple[int, ...]]) -> None:
    where = f"layer {layer} of {plan.source.reference}"
    for name, shape in expected.items():
        if name not in reader.infos:
            raise Failure(f"{where} lacks tensor {name}", hint="config.json and the weights are not of the same model")
        found = reader.infos[name].shape
        if found != shape:
            raise Failure(
                f"config.json and the weights disagree: {name} is {list(found)}, by the config it is {list(shape)}",
                hint="compare num_attention_heads, num_key_value_heads, head_dim and hidden_size with the weights",
            )
    norm, width = plan.family.input_norm(layer), plan.source.config.hidden_size
    for name in (f"{norm.name}.weight", f"{norm.name}.bias") if norm else ():
        found = reader.infos[name].shape if name in reader.infos else (width,)
        if found != (width,):
            raise Failure(
                f"config.json and the weights disagree: {name} is {list(found)}, by the config it is [{width}]",
                hint="compare hidden_size with the weights",
            )
    module = plan.family.module(layer) + "."
    # Old checkpoints keep RoPE's frequencies, which classes compute nowadays; they are copied like any other tensor.
    extra = [n for n in reader.infos if n.startswith(module) and n not in expected and not n.endswith("inv_freq")]
    if extra:
        raise Failure(
            f"{where} has tensor {extra[0]}, which {plan.family.model_type} with this config does not",
            hint="converting would drop it; check the biases and norms that config.json switches on",
        )


def _check_depth(plan: Plan, reader: Reader) -> None:
    """Attention beyond the last layer of the config would be copied unconverted: refuse it."""
    layers = plan.before.num_layers
    beyond = [name.replace(".0.", f".{layers}.", 1) for name in plan.family.shapes(plan.source.config, 0)]
    if found := [name for name in beyond if name in reader.infos]:
        raise Failure(
            f"config.json gives {layers} layers, and the weights hold {found[0]}",
            hint="set num_hidden_layers to what the weights have",
        )


def _layer_outputs(plan: Plan, reader: Reader, layer: int, stored: torch.dtype | None) -> dict[str, TensorInfo]:
    """A converted layer's tensors. Each keeps the dtype of the source's of that name, or of its first projection."""
    first = next(iter(plan.family.shapes(plan.source.config, layer)))
    shapes = plan.host.shapes(plan.family, plan.source.config, plan.target, layer)
    dtypes = {name: reader.infos.get(name, reader.infos[first]).dtype for name in shapes}
    return {name: TensorInfo(shape, dtypes[name]).stored_as(stored) for name, shape in shapes.items()}


def deal(units: list[Unit], limit: int) -> list[list[Unit]]:
    """Fill shards in order; a unit larger than the limit gets a shard of its own."""
    shards: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if shards[-1] and size + unit.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += unit.nbytes
    return shards
