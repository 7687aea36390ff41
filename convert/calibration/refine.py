"""Fits one converted layer to its source on calibration text by gradient descent, after the method.

`refined` minimises the error of the whole decoder layer's output over its attention's weights: inputs come through the
converted layers before it, and the aim is the output of the source's layer on the source's inputs, so that a layer also
compensates for earlier losses. The error of each token is relative to the size of its output, as the norm behind it sees it:
real models have tokens whose channels are a thousand times larger than all others. Matrices take Muon steps (Jordan et al.,
2024) of a share of their own root mean square, so that one rate works for every layer and model; biases take Adam steps. No
gradient crosses a layer.

Steps fit the blocks that they see, and with little text nothing else. So a trial comes first, on seven eighths of the blocks:
only if it leaves the others about as close as they were, the steps are taken on all blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from attention.record import FactoredAttention, Record
from attention.spread import spread_blocks
from convert.calibration.stream import LayerStream

_RATES = (0.03, 0.003)  # first step, as a share of a matrix's root mean square; chosen on text that no reported figure uses
_WARM = 0.05  # share of all steps
_TOKENS = 2048  # tokens per step, but at least one row
_JUDGED = 8192  # tokens of a trial that no step sees
_TOLERATED = 1.1  # times the error there: whole models still gain from steps on all blocks
_NOTHING = 1e-12  # share of the input's energy

Write = Callable[[Record], Mapping[str, torch.Tensor]]


def refined(
    record: Record, write: Write, student: LayerStream, teacher: LayerStream, layer: int, steps: int, seed: int
) -> tuple[Record, dict[str, float]]:
    """Gradient descent on a layer's weights: at the usual rate, else at a tenth of it, else not at all, as trials allow.

    Args:
        record: The starting point.
        write: Maps a record to weights by their names in the host.
        student: The result, at this layer.
        teacher: The source, past this layer.
        layer: The index of the layer.
        steps: Steps of gradient descent.
        seed: For the order of blocks.

    Returns:
        The record, and the relative squared error of the layer's output before and after the trial, on rows that no step of it
        saw (a single row does both).
    """
    fit = _LayerFit(write, student, teacher, layer)
    before = fit.judged(record)
    for rate in _RATES:
        trial = fit.descended(record, rate, steps, seed, fit.fitted)
        after = fit.judged(trial)
        if after <= _TOLERATED * before:  # not if it is NaN
            found = fit.descended(record, rate, steps, seed, fit.rows) if len(fit.rows) > 1 else trial
            return found, {"layer_error": before, "layer_error_refined": after}
    return record, {"layer_error": before, "layer_error_refined": before}


class _LayerFit:
    """The problem of fitting one layer. Arguments as of `refined`."""

    def __init__(self, write: Write, student: LayerStream, teacher: LayerStream, layer: int) -> None:
        self._write, self._student, self._teacher, self._layer = write, student, teacher, layer
        text, self._rest = student.text, student.rest(layer)
        self.rows = list(range(len(text.rows)))
        self.fitted, others = text.parted()
        self._count = min(len(self.fitted), max(1, _TOKENS // text.context))  # rows per step
        self._others = [others[i] for i in spread_blocks(_JUDGED, len(others), text.context)]

    def judged(self, record: Record) -> float:
        """The error on rows that no step of a trial sees."""
        parts = [self._others[start : start + self._count] for start in range(0, len(self._others), self._count)]
        with torch.no_grad():
            return sum(float(self._error(record, part)) * len(part) for part in parts) / len(self._others)

    def descended(self, record: Record, rate: float, steps: int, seed: int, rows: list[int]) -> Record:
        """The record that steps at this rate on these rows lead to."""
        weights, count = _Weights(record), self._count
        optimisers = weights.optimisers(rate)
        schedule = [torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _warmed(step, steps)) for optimiser in optimisers]
        order = _shuffled(rows, steps * count, seed * 100_003 + self._layer)
        for step in range(steps):
            for optimiser in optimisers:
                optimiser.zero_grad()
            self._error(weights.record(), order[step * count : (step + 1) * count]).backward()
            for optimiser, rates in zip(optimisers, schedule, strict=True):
                optimiser.step()
                rates.step()
        with torch.no_grad():
            return weights.record()

    def _error(self, record: Record, rows: Sequence[int]) -> torch.Tensor:
        """The error on these rows."""
        x, y = self._student.select(self._layer, rows), self._teacher.select(self._layer + 1, rows).hidden
        return _relative(self._student.run(self._layer, self._rest, x, self._write(record)), x.hidden, y)


def _relative(outputs: torch.Tensor, inputs: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The squared error of `outputs [b, t, E]` over what the layer adds, with every token scaled to an output of size one."""
    tiny = torch.finfo(torch.float32).tiny
    size = expected.square().mean(-1, keepdim=True).clamp_min(tiny).rsqrt()
    parts = outputs - expected, expected - inputs, inputs
    error, added, read = ((size * part).square().sum() for part in parts)
    return error / torch.maximum(added, _NOTHING * read).clamp_min(tiny)  # a layer may add nothing


def _shuffled(blocks: list[int], count: int, seed: int) -> list[int]:
    """`count` blocks: all of them in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    passes = [torch.randperm(len(blocks), generator=generator).tolist() for _ in range(-(-count // len(blocks)))]
    return [blocks[i] for order in passes for i in order][:count]


def _warmed(step: int, steps: int) -> float:
    """The share of the rate at a step: linear warm-up, then linear decay."""
    return min(1.0, (step + 1) / max(1.0, _WARM * steps)) * (1 - step / steps)


class _Weights:
    """A record's tensors as parameters, heads stacked in a matrix. Rotary tables, sinks, norms and what is before them stay."""

    def __init__(self, record: Record) -> None:
        self._start = record
        found = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "sinks"}
        if isinstance(record, FactoredAttention) and record.normalised:
            # A norm like the others; and that behind `q_down` changes nothing only as it is (`portable_norm.behind_norm`).
            del found["gain"], found["q_down"]
        self._values = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        self._parameters = {name: _stacked(name, value) for name, value in self._values.items()}

    def record(self) -> Record:
        """The record with the current weights; differentiable."""
        shaped: dict[str, Any] = {name: p.view(self._values[name].shape) for name, p in self._parameters.items()}
        return replace(self._start, **shaped)

    def optimisers(self, rate: float) -> list[torch.optim.Optimizer]:
        scale = {name: max(float(p.detach().square().mean().sqrt()), 1e-12) for name, p in self._parameters.items()}
        matrices = [
            # With this adjustment Muon's step has a root mean square of 0.2 × the rate.
            {"params": [p], "lr": rate * scale[name] / 0.2}
            for name, p in self._parameters.items()
            if p.ndim == 2
        ]
        biases = [{"params": [p], "lr": rate * scale["o"]} for p in self._parameters.values() if p.ndim == 1]
        muon = torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.0, eps=1e-30, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.Adam(biases, betas=(0.95, 0.95))] if biases else [muon]


def _stacked(name: str, value: torch.Tensor) -> torch.Tensor:
    """`[heads, D, E]` as `[heads D, E]`, `[E, H, D]` as `[E, H D]`, biases as one row; a leaf in fp32."""
    flat = value.flatten() if name.endswith("bias") else value.flatten(1) if name == "o" else value.flatten(0, -2)
    return flat.detach().float().clone().requires_grad_(True)
