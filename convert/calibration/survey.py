"""The survey: one pass over the source that stores statistics of each layer in the work directory, where `--resume` finds them.

For each layer it keeps the first two moments of its activations and a bounded sample, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from attention.errors import Failure
from convert.calibration.stream import LayerStream
from convert.checkpoint.shelf import Shelf
from convert.methods.statistics import Statistics
from eval.progress import Progress, silent, stage

SAMPLE = 4096  # tokens, but at least one block


class Moments:
    """The running first and second moment of a layer's input, fp64, and a sample of evenly spread blocks.

    Args:
        layer: The index of the layer.
        stream: The model that runs.
    """

    def __init__(self, layer: int, stream: LayerStream) -> None:
        blocks, context = stream.blocks
        self._layer, self._tokens, self._seen = layer, 0, 0
        count = min(blocks, max(1, SAMPLE // context))
        self._sampled = {(2 * i + 1) * blocks // (2 * count) for i in range(count)}
        self._sample: list[torch.Tensor] = []
        self._sum = torch.zeros(stream.width, dtype=torch.float64, device=stream.device)
        self._second = torch.outer(self._sum, self._sum)

    def see(self, x: torch.Tensor) -> None:
        """Add `x [b, T, E]`.

        Raises:
            Failure: `x` is not finite.
        """
        self._sample += [x[i].bfloat16() for i in range(len(x)) if self._seen + i in self._sampled]
        self._seen += len(x)
        x = x.flatten(0, 1)
        second, total = x.T @ x, x.sum(0, dtype=torch.float64)
        if not (torch.isfinite(second).all() and torch.isfinite(total).all()):
            raise Failure(
                f"the input of layer {self._layer}'s attention is not finite on the calibration text",
                hint="the source's weights are damaged, or overflow even in float32; does `convert eval` of it work?",
            )
        self._second += second
        self._sum += total
        self._tokens += len(x)

    def statistics(self) -> Statistics:
        """The statistics of everything seen.

        Raises:
            Failure: Every input was zero.
        """
        if not self._second.any():
            raise Failure(
                f"the input of layer {self._layer}'s attention is zero on the whole calibration text",
                hint="the layers before it overflow in float32, or its norm is zero: the source's weights are damaged",
            )
        sample = torch.stack(self._sample)
        return Statistics(self._second / self._tokens, self._sum / self._tokens, self._tokens, sample)


def survey(stream: LayerStream, shelf: Shelf, progress: Progress = silent) -> Callable[[int], Statistics]:
    """Fill the shelf, continuing where an earlier run stopped.

    Args:
        stream: The model to survey.
        shelf: Where the statistics are stored.
        progress: Called with the number of finished layers.

    Returns:
        Maps a layer to its statistics.
    """
    layers = stream.num_layers
    done = next((layer for layer in range(layers) if not shelf.has(layer)), layers)
    if done == layers:
        return partial(_get, shelf)
    ready = max(stream.ready, default=None)
    if ready is None or ready > done:  # inputs are missing that later layers need
        stream.discard()
        stream.embed()
        ready = 0
    with stage(progress, "survey", layers - ready, "layer") as done_layers:
        for layer in range(ready, layers):
            moments = Moments(layer, stream)
            if layer + 1 < layers:
                stream.advance(layer, moments.see, partial(_put, shelf, layer, moments))
            elif not shelf.has(layer):
                stream.observe(layer, moments.see)
                _put(shelf, layer, moments)
            done_layers(1)
    stream.discard()
    return partial(_get, shelf)


def _put(shelf: Shelf, layer: int, moments: Moments) -> None:
    found = moments.statistics()
    assert found.sample is not None, "a survey takes samples"
    tensors = {"second_moment": found.second, "first_moment": found.mean, "sample": found.sample}
    shelf.put(layer, tensors, {"tokens": found.tokens})


def _get(shelf: Shelf, layer: int) -> Statistics:
    tensors, note = shelf.get(layer)
    return Statistics(tensors["second_moment"], tensors["first_moment"], note["tokens"], tensors["sample"])
