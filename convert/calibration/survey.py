"""The survey: one pass over the source that leaves a few numbers per layer, in the work directory, for `--resume` to reuse.

Of one layer's activations, their first two moments and a bounded sample are all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attention.errors import Failure
from convert.calibration.stream import LayerStream
from convert.checkpoint.shelf import Shelf
from convert.methods.statistics import Statistics
from eval.progress import Progress, silent, stage

SAMPLE = 4096  # tokens, but at least one block


class Moments:
    """Running first and second moment of a layer's input, fp64, and some blocks of it, spread evenly.

    Args:
        layer: Which layer's.
        stream: Whose.
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
            Failure: It is not finite.
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
        """What has been seen.

        Raises:
            Failure: Nothing but zeros.
        """
        if not self._second.any():
            raise Failure(
                f"the input of layer {self._layer}'s attention is zero on the whole calibration text",
                hint="the layers before it overflow in float32, or its norm is zero: the source's weights are damaged",
            )
        sample = torch.stack(self._sample)
        return Statistics(self._second / self._tokens, self._sum / self._tokens, self._tokens, sample)


def survey(stream: LayerStream, shelf: Shelf, progress: Progress = silent) -> Callable[[int], Statistics]:
    """Fill the shelf, going on where an earlier run stopped.

    Args:
        stream: Of the model whose inputs are wanted.
        shelf: Where statistics lie.
        progress: Told how many layers are done.

    Returns:
        Layer → what was found of it.
    """
    layers = stream.num_layers
    done = next((layer for layer in range(layers) if not shelf.has(layer)), layers)
    if done == layers:
        return partial(_get, shelf)
    ready = max(stream.ready, default=None)
    if ready is None or ready > done:  # inputs are lost, and later ones need them
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
    found = dict(vars(moments.statistics()))
    note = {"tokens": found.pop("tokens")}
    shelf.put(layer, found, note)


def _get(shelf: Shelf, layer: int) -> Statistics:
    tensors, note = shelf.get(layer)
    values: dict[str, Any] = {**tensors, **note}
    return Statistics(**values)
