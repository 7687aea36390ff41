"""The survey: one pass over the source that leaves a few numbers per layer, in the work directory, for `--resume` to reuse.

Nothing of one layer's activations outlives that layer: their first two moments are all that is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from attention.errors import Failure
from convert.record import Statistics
from convert.stream import LayerStream


class Moments:
    """Running first and second moment of a layer's input, fp64.

    Args:
        layer: For messages.
    """

    def __init__(self, layer: int) -> None:
        self._layer, self._tokens = layer, 0
        self._second: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None

    def see(self, x: torch.Tensor) -> None:
        """Add `x [b, T, E]`.

        Raises:
            Failure: It is not finite.
        """
        x = x.flatten(0, 1)
        second, total = (x.T @ x).double(), x.double().sum(0)
        if not (torch.isfinite(second).all() and torch.isfinite(total).all()):
            raise Failure(
                f"the input of layer {self._layer}'s attention is not finite on the calibration text",
                hint="the source's weights are damaged, or overflow even in float32; does `convert eval` of it work?",
            )
        self._second = second if self._second is None else self._second + second
        self._sum = total if self._sum is None else self._sum + total
        self._tokens += len(x)

    def statistics(self) -> Statistics:
        assert self._second is not None
        assert self._sum is not None
        return Statistics(self._second / self._tokens, self._sum / self._tokens, self._tokens)


class Shelf:
    """Where statistics lie, one file a layer.

    Args:
        directory: Of the survey.
        name: "source", or "converted" where the inputs come through converted layers.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self.spool = directory / f"{name}-inputs"

    def _path(self, layer: int) -> Path:
        return self._directory / f"{self._name}-{layer:05d}.safetensors"

    def has(self, layer: int) -> bool:
        return self._path(layer).is_file()

    def put(self, layer: int, statistics: Statistics) -> None:
        path = self._path(layer)
        tensors = {"second": statistics.second.cpu(), "mean": statistics.mean.cpu(), "tokens": torch.tensor(statistics.tokens)}
        save_file(tensors, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def get(self, layer: int) -> Statistics:
        found = load_file(self._path(layer))
        return Statistics(found["second"], found["mean"], int(found["tokens"]))


def survey(stream: LayerStream, shelf: Shelf, before_advance: Callable[[int], None], quiet: bool) -> None:
    """Fill the shelf, going on where an earlier run stopped.

    Args:
        stream: Of the model whose inputs are wanted.
        shelf: Where statistics go.
        before_advance: Called with a layer whose statistics are on the shelf and whose weights are needed next.
        quiet: No progress bar.
    """
    num_layers = stream.num_layers
    done = next((layer for layer in range(num_layers) if not shelf.has(layer)), num_layers)
    ready = stream.next_layer
    if done < num_layers and (ready is None or ready > done):  # inputs are lost, and later ones need them
        stream.discard()
        stream.embed()
        ready = 0
    bar = tqdm(range(ready or 0, num_layers), desc="survey", unit="layer", file=sys.stderr, disable=quiet or None)
    for layer in bar if done < num_layers else ():
        if not shelf.has(layer):
            moments = Moments(layer)
            stream.observe(layer, moments.see)
            shelf.put(layer, moments.statistics())
        if layer + 1 < num_layers:
            before_advance(layer)
            stream.advance(layer)
    stream.discard()
