"""The survey: one pass over the source that stores statistics of each layer in the work directory, where `--resume` finds them.

For each layer it keeps the first two moments of its activations, also as its attention sees them, and a bounded sample.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attention.errors import Failure
from attention.forward import Heads, heads_of
from attention.record import Attention
from attention.spread import evenly_spread, spread_blocks
from convert.calibration.stream import LayerStream
from convert.methods.blocks import Blocks
from convert.methods.statistics import EXCERPT, SURVEYED, Attended, Statistics
from eval.inputs.sealed import Shelf
from eval.terminal.progress import Progress, silent, stage

_LEAST_ENERGY = 1e-3  # of the median token's: a token whose embedding is next to nothing would outweigh all others
FIRST_TOKENS = 1 / 40  # the weight of all first tokens, as a share of the text's, in layers that are fitted to them
QUERIES = 64  # of each block, evenly spread, whose attention is measured

_ATTENDED = "attended_"  # what the tensors of `Attended` have before their names, on the shelf


class Moments:
    """The running moments of what a layer's keys and values are made of, fp64, also as its attention sees them.

    That is the layer's input, of which it takes a sample of evenly spread rows, or what projections make of it; they also make
    the queries, whose moments are then taken head by head.

    Args:
        layer: The index of the layer.
        stream: The model that runs.
        attention: The source's attention of that layer.
        sample: Tokens of the sample, but at least one row.
        shown: Whether the record shows where it looks.

    Attributes:
        sampled: The rows of the text that are the sample.
    """

    def __init__(
        self, layer: int, stream: LayerStream, attention: Attention, sample: int = EXCERPT, shown: bool = True
    ) -> None:
        self._layer, self._attention, self._text = layer, attention, stream.text
        self.sampled = spread_blocks(sample, len(stream.text.rows), stream.text.context)
        self._index_of = {row: index for index, row in enumerate(self.sampled)}
        self._seen = 0  # rows
        shape = len(self.sampled), self._text.context, stream.width
        self._sample = torch.zeros(shape, dtype=torch.bfloat16, device=stream.device)
        width = attention.k.shape[-1]
        self._sum = torch.zeros(width, dtype=torch.float64, device=stream.device)
        self._second = torch.outer(self._sum, self._sum)
        self._queries = torch.zeros((), dtype=torch.float64, device=stream.device)  # of projections
        self._attended = _AttendedSums(width, len(attention.q), stream.device, attention.sinks is not None) if shown else None

    def see(self, x: torch.Tensor) -> None:
        """Add the next blocks, `x [b, T, E]`."""
        text = self._text.of(range(self._seen, self._seen + len(x)))
        for row, block in enumerate(x, self._seen):
            if row in self._index_of:
                self._sample[self._index_of[row]] = block.bfloat16()
        self._seen += len(x)
        numbers = x
        if projections := self._attention.projections:
            queries, numbers = projections(x)
            self._queries = self._queries + _with_constant(queries)
        numbers = numbers.flatten(0, 1)
        self._second += numbers.T @ numbers
        self._sum += numbers.sum(0, dtype=torch.float64)
        if self._attended:
            for ids, block in zip(text.rows, replace(text, rows=x).blocks, strict=True):
                self._attended.add(heads_of(self._attention, block), ids.to(x.device))

    def see_first(self, x: torch.Tensor) -> None:
        """Count first tokens of texts `[n, 1, E]`, each of which reads itself alone, among what attention reads."""
        if self._attended and self._attention.sinks is None:
            projections = self._attention.projections
            self._attended.add_first((projections(x)[1] if projections else x)[:, 0])

    def statistics(self) -> Statistics:
        """The statistics of everything that was seen.

        Raises:
            Failure: An input was not finite, or every input was zero.
        """
        where = f"of layer {self._layer}"
        _require_finite(f"the input {where}'s attention", self._second, self._sum)
        if not self._second.any():
            raise Failure(
                f"the input {where}'s attention is zero on the whole calibration text",
                hint="the layers before it overflow in float32, or its norm is zero: the source's weights are damaged",
            )
        sample, tokens = replace(self._text.of(self.sampled), rows=self._sample), self._seen * self._text.context
        second, mean = self._second / tokens, self._sum / tokens
        attended = self._attended.moments() if self._attended else Attended.assumed(second, mean)
        _require_finite(f"the attention {where}", attended.seen, attended.read)
        queries = self._queries / tokens if self._attention.projections else None
        return Statistics(second, mean, tokens, attended, sample, queries=queries)


def _require_finite(what: str, *tensors: torch.Tensor) -> None:
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise Failure(
            f"{what} is not finite on the calibration text",
            hint="the source's weights are damaged, or overflow even in float32; does `convert eval` of it work?",
        )


def _with_constant(queries: torch.Tensor) -> torch.Tensor:
    """`[H, D + 1, D + 1]`, the sum over tokens of (q, 1) (q, 1)ᵀ for queries `[b, H, t, D]`."""
    rows = torch.nn.functional.pad(queries, (0, 1), value=1).transpose(0, 1).flatten(1, 2)
    return (rows.mT @ rows).double()


class _AttendedSums:
    """Sums over sampled queries and all heads; `matching` is apart for each head."""

    def __init__(self, width: int, heads: int, device: torch.device, sinks: bool = False) -> None:
        self._count, self._matches = 0.0, 0
        self._matched = torch.zeros(heads, dtype=torch.float64, device=device)
        self._mean = torch.zeros(width, dtype=torch.float64, device=device)
        self._seen, self._read = (torch.outer(self._mean, self._mean) for _ in range(2))
        self._sunk = torch.zeros(width + 2, dtype=torch.float64, device=device) if sinks else None

    def add(self, heads: Heads, ids: torch.Tensor) -> None:
        """Add the attention over a block of tokens `ids [T]`."""
        length = len(heads.inputs)
        rows = torch.tensor(evenly_spread(min(length, QUERIES), length), device=heads.inputs.device)
        probabilities, found = heads.attention_of(rows), matches(ids, rows)
        self._matched += (probabilities * found).sum((1, 2))
        self._matches += int(found.any(1).sum())
        probabilities = probabilities.flatten(0, 1)  # [H t, T]
        read = probabilities @ heads.inputs
        self._seen += heads.inputs.T @ (probabilities.sum(0)[:, None] * heads.inputs)
        self._read += read.T @ read
        self._mean += read.sum(0, dtype=torch.float64)
        self._count += len(read)
        if self._sunk is not None:
            rest = 1 - probabilities.sum(1)
            self._sunk += torch.cat((rest @ read, rest.sum()[None], (rest @ rest)[None]))

    def add_first(self, inputs: torch.Tensor) -> None:
        """Add all tokens `[n, E]` that attend to themselves alone, at once, as `FIRST_TOKENS` of the queries before."""
        weight = FIRST_TOKENS * self._count / len(inputs)
        second = weight * inputs.T @ inputs
        self._seen += second
        self._read += second
        self._mean += weight * inputs.sum(0, dtype=torch.float64)
        self._count += weight * len(inputs)

    def moments(self) -> Attended:
        seen, read, mean = (part / self._count for part in (self._seen, self._read, self._mean))
        sunk = None if self._sunk is None else self._sunk / self._count
        return Attended(seen, seen - read, read, mean, sunk, matching=self._matched / max(1, self._matches))


def matches(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`[t, T]`, for each of `rows [t]` of a text's `ids [T]`: which tokens follow earlier places of it and the one before."""
    pairs = torch.stack((ids, ids.roll(1)))
    same = (pairs[:, rows, None] == pairs[:, None]).all(0) & (torch.arange(len(ids)).to(rows) < rows[:, None] - 1)
    same[:, 0] = False  # which has none before it
    return same.roll(1, 1)


def survey(
    stream: LayerStream,
    shelf: Shelf,
    records: Callable[[int], Attention],
    layers: Collection[int],
    shown: bool = True,
    progress: Progress = silent,
) -> Callable[[int], Statistics]:
    """Fill the shelf, continuing where an earlier run stopped.

    Args:
        stream: The model to survey.
        shelf: Where the statistics are stored.
        records: Maps a layer to its attention.
        layers: The layers to survey.
        shown: Whether the records show where attention looks.
        progress: Called with the number of finished layers.

    Returns:
        Maps a layer to its statistics.
    """
    missing, last = [layer for layer in layers if not shelf.has(layer)], max(layers)
    if not missing:
        return partial(_get, shelf)
    begin = max((layer for layer in stream.ready if layer <= min(missing)), default=None)
    if begin is None:
        stream.discard()
        stream.embed()
        begin = 0
    with stage(progress, "survey", last + 1 - begin, "layer") as done:
        for layer in range(begin, last + 1):
            moments = Moments(layer, stream, records(layer), SURVEYED, shown) if layer in layers else None
            if layer < last:
                stream.advance(layer, moments.see if moments else None)
            elif moments:
                stream.observe(layer, moments.see)
            if moments:
                _put(shelf, stream, layer, moments)
            done(1)
    stream.discard()
    return partial(_get, shelf)


def _put(shelf: Shelf, stream: LayerStream, layer: int, moments: Moments) -> None:
    found = moments.statistics()
    assert found.sample is not None, "a survey takes samples"
    squares = stream.select(layer, moments.sampled).hidden.double().square().sum(-1)
    least = (_LEAST_ENERGY * squares.median()).clamp_min(torch.finfo(torch.float64).tiny)
    tensors = {name: part for name, part in vars(found).items() if isinstance(part, torch.Tensor)}
    attended = {_ATTENDED + name: tensor for name, tensor in found.attended.tensors.items()}
    inverse_energy = float(squares.maximum(least).reciprocal().mean())
    sample = {"sample": found.sample.rows, "positions": found.sample.positions}
    shelf.put(layer, tensors | attended | sample, {"tokens": found.tokens, "inverse_energy": inverse_energy})


def _get(shelf: Shelf, layer: int) -> Statistics:
    tensors, note = shelf.get(layer)
    sample = Blocks(tensors.pop("sample"), tensors.pop("positions"))
    attended = {name.removeprefix(_ATTENDED): tensors.pop(name) for name in [*tensors] if name.startswith(_ATTENDED)}
    found: dict[str, Any] = tensors | note
    return Statistics(**found, attended=Attended(**attended), sample=sample)
