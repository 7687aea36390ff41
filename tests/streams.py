"""What tests of layer streams share: tiny models, a stream of each, and what layers see in the whole model."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_config, tiny_model

from attention.record import Attention
from convert.calibration.stream import LayerStream, Weights
from convert.checkpoint.loading import empty_model
from convert.families import FAMILIES
from convert.methods.blocks import Blocks
from eval.inputs.reader import TensorInfo

CPU = torch.device("cpu")
WINDOWS = {"sliding_window": 5}


def model_of(model_type: str = "llama", **changes: Any) -> Any:
    return tiny_model(tiny_config(model_type, **changes))


class InMemory:
    """A model's weights in place of its checkpoint."""

    def __init__(self, model: Any, read: Callable[[str], torch.Tensor] | None = None) -> None:
        self.tensors = model.state_dict()
        self.infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}
        self._read = read or self.tensors.__getitem__

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name)


def seen_by(model: Any, blocks: torch.Tensor, **positions: torch.Tensor) -> list[torch.Tensor]:
    """What goes into each layer's attention in the whole model: `[n, T, E]` each."""
    seen: list[torch.Tensor] = []

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).clone())

    family = FAMILIES[model.config.model_type]
    paths = [family.module(layer) for layer in range(model.config.num_hidden_layers)]
    handles = [model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True) for path in paths]
    with torch.inference_mode():
        model(blocks, use_cache=False, **positions)
    for handle in handles:
        handle.remove()
    return seen


def stream_of(
    model: Any, spool: Path, text: torch.Tensor | Blocks, weights: Weights | None = None, device: torch.device = CPU
) -> LayerStream:
    text = text if isinstance(text, Blocks) else Blocks.whole(text)
    family, weights = FAMILIES[model.config.model_type], weights or InMemory(model)
    return LayerStream(empty_model(model.config), family, weights, text, spool, device)


def observed(stream: LayerStream, layer: int) -> list[torch.Tensor]:
    """What the layer's attention sees, batch by batch."""
    seen: list[torch.Tensor] = []
    stream.observe(layer, lambda x: seen.append(x.clone()))
    return seen


def records_of(model: Any) -> Callable[[int], Attention]:
    """Maps a layer to the record of its attention, as methods take it."""
    family, weights = FAMILIES[model.config.model_type], model.state_dict()

    def record(layer: int) -> Attention:
        tensors = {name: weights[name] for name in family.of(model.config).shapes(layer)}
        found = family.of(model.config).split(tensors, layer)
        assert isinstance(found, Attention)
        return found

    return record


def of_blocks(count: int, context: int, width: int, ids: torch.Tensor | float = 0.0) -> Any:
    """As much of a stream as sums have to know."""
    text = Blocks.whole(torch.zeros(count, context) + ids)
    return types.SimpleNamespace(text=text, width=width, device=CPU)
