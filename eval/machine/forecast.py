"""How long work will take on this machine: its size, from shapes alone, times rates that a short calibration measures.

Commands sum up their own work beside what carries it out, and say how long it takes before it begins.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from attention.errors import Refusal
from attention.spec import AttentionSpec
from eval.machine.capacity import without_weights
from eval.machine.device import out_of_memory

_log = logging.getLogger("kvfold")
_MOMENT = 5.0  # seconds: what takes less is not worth a line
_PROBE = 0.15  # seconds that each rate is measured for
_WIDTHS = 64, 4096  # of the matrices that rates are measured with
_ROWS = {"cpu": 256, "cuda": 8192}  # of inputs, in such a measurement
_MANY = {"cpu": 2**20, "cuda": 2**26}  # values of an elementwise operation
_LARGE = {"cpu": 2**25, "cuda": 2**26}  # values of a matrix that no cache holds
# Of one forward pass, measured on CPUs.
_ELEMENTWISE = 1.5  # values that norms, activations and rotations go through, for each row and column of a matrix and token
_OPERATORS = 150  # calls per layer
# Of distillation.
_COMPARED = 10  # values that the distance goes through for each logit, both models' and the gradient's
_UPDATED = 12  # values of a step of AdamW, and of the norm of gradients, for each number that trains


@dataclass(frozen=True)
class Work:
    """Work, whatever the machine. It adds up, and can be multiplied.

    Attributes:
        flops: Of matrix products: two for each weight and token.
        values: Numbers that elementwise operations go through, such as an exponential.
        bytes: That are only read or written: weights and cache of a decode step, files.
        calls: Of operators, each of which takes time, however small its tensors are.
    """

    flops: float = 0.0
    values: float = 0.0
    bytes: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * one for one in astuple(self)))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Machine:
    """The rates of a device, per second.

    Attributes:
        device: "cpu", "cuda:0", …
        flops, values, bytes, calls: As of `Work`, in one second.
    """

    device: str
    flops: float
    values: float
    bytes: float
    calls: float

    @classmethod
    def measured(cls, device: Any, width: int, dtype: str = "float32") -> Machine:
        """Measure a device, once per process; takes about a second.

        Args:
            device: A `torch.device`.
            width: Of the model: small matrix products have lower rates.
            dtype: That it computes in.
        """
        least, most = _WIDTHS
        return _measured(str(device), min(most, max(least, width)), dtype)

    def seconds(self, work: Work) -> float:
        """How long the work takes here."""
        return sum(amount / rate for amount, rate in zip(astuple(work), astuple(self)[1:], strict=True))


# Slower than any machine that models run on: what is a moment's work here is not worth a calibration anywhere.
_SLOW = Machine("", 2e10, 2e8, 2e9, 1e5)


@functools.lru_cache
def _measured(name: str, width: int, dtype: str) -> Machine:
    import torch

    device, kind = torch.device(name), getattr(torch, dtype)
    rows = _ROWS[device.type]
    inputs, matrix = (torch.ones(count, width, device=device, dtype=kind) for count in (rows, width))
    values = torch.ones(_MANY[device.type], device=device)
    weights = torch.ones(_LARGE[device.type] // width, width, device=device, dtype=kind)
    few = torch.ones(64, device=device)
    rates = (
        (2 * rows * width * width, lambda: inputs @ matrix),
        (values.numel(), values.exp),
        (weights.nbytes, lambda: inputs[:1] @ weights.mT),
        (100, lambda: [few.add(1) for _ in range(100)]),
    )
    with torch.inference_mode():
        return Machine(name, *(amount / _seconds(device, run) for amount, run in rates))


def _seconds(device: Any, run: Callable[[], object]) -> float:
    """Of the fastest run: other processes slow down some."""
    from eval.machine.clock import timed

    timed(device, run, _nothing, 1)
    end, taken = time.monotonic() + _PROBE, list[float]()
    while time.monotonic() < end or not taken:
        taken += timed(device, run, _nothing, 1)
    return max(min(taken), 1e-9)


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Decoder:
    """The cost of a token in a model, from shapes alone.

    Attributes:
        layers: L.
        width: E.
        vocabulary: Tokens that logits are of.
        parameters: All of them.
        weights: Those of matrices in all layers that one token meets, of experts the active ones.
        dims: Rows and columns of these matrices.
        heads: Query heads of all layers.
        head_dims: Of a head's keys and values together.
    """

    layers: int
    width: int
    vocabulary: int
    parameters: int
    weights: float
    dims: float
    heads: int
    head_dims: int

    @classmethod
    def of(cls, config: Any, trust_remote_code: bool = False) -> Decoder:
        """That of a config of transformers; of a usual one of its size where its class builds no model without weights."""
        from torch import nn

        text = config.get_text_config(decoder=True)
        layers, width, vocabulary = int(text.num_hidden_layers), int(text.hidden_size), int(text.vocab_size)
        try:
            model = without_weights(config, trust_remote_code)
        except Refusal:
            usual = 12 * layers * width**2, 16 * layers * width
            return cls(layers, width, vocabulary, usual[0] + 2 * width * vocabulary, *usual, *_heads(config, layers, width))
        outputs = model.get_output_embeddings()
        around = {id(module) for module in model.modules() if module is outputs or isinstance(module, nn.Embedding)}
        weights = dims = 0.0
        for name, module in model.named_modules():
            share = _active(text) if ".experts" in name else 1.0
            for matrix in (p for p in module.parameters(recurse=False) if p.ndim > 1 and id(module) not in around):
                weights += share * matrix.numel()
                dims += share * matrix.numel() / matrix.shape[-1] / matrix.shape[-2] * sum(matrix.shape[-2:])
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(layers, width, vocabulary, parameters, weights, dims, *_heads(config, layers, width))

    def forward(self, tokens: int, context: int, logits: int | None = None, passes: int | None = None) -> Work:
        """A forward pass of causal attention, or several.

        Args:
            tokens: In all.
            context: Of each block.
            logits: Tokens whose logits are computed; None for all.
            passes: In how many the tokens are run; None for one per block.
        """
        logits = tokens if logits is None else logits
        passes = math.ceil(tokens / context) if passes is None else passes
        logits_of_heads = tokens * self.heads * context / 2  # of causal attention: half of the context on average
        of_layers = 2 * (self.weights * tokens + self.head_dims * logits_of_heads)
        values = _ELEMENTWISE * self.dims * tokens + logits_of_heads
        return Work(of_layers + 2 * self.width * self.vocabulary * logits, values, calls=_OPERATORS * self.layers * passes)

    def distilled(self, tokens: int, context: int, trained: int, steps: int) -> Work:
        """Steps of distillation into this model, without its teacher's passes.

        A backward pass takes as much as a forward pass by the activations, and as much again by the weights that train.

        Args:
            tokens: In all.
            context: Of each block.
            trained: Numbers that train.
            steps: Of AdamW.
        """
        share = min(1.0, trained / self.parameters)
        passes = 2 * self.forward(tokens, context) + share * self.forward(tokens, context, logits=0)
        return passes + self.compared(tokens) + Work(values=_UPDATED * trained * steps)

    def compared(self, tokens: int) -> Work:
        """The distances of the logits of some tokens to a teacher's."""
        return Work(values=_COMPARED * self.vocabulary * tokens)

    def load(self) -> Work:
        """Loading the weights from disk."""
        return Work(values=self.parameters, bytes=4 * self.parameters, calls=_OPERATORS * self.layers)


def _active(text: Any) -> float:
    """The share of experts that a token meets."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((found for name in names if (found := getattr(text, name, None))), 0)
    used = getattr(text, "num_experts_per_tok", None) or count
    return min(1.0, used / count) if count else 1.0


def _heads(config: Any, layers: int, width: int) -> tuple[int, int]:
    """Query heads of all layers, and the dims of a head's keys and values."""
    try:
        spec = AttentionSpec.from_config(config)
    except Refusal:  # its layers differ
        return layers, 2 * width
    return spec.num_layers * spec.num_heads, spec.key_dim + spec.head_dim


def expected_seconds(work: Work, device: Any, width: int, dtype: str = "float32") -> float:
    """How long work will take; arguments as of `Machine.measured`."""
    return Machine.measured(device, width, dtype).seconds(work)


def foretell(work: Work, device: Any, width: int, dtype: str = "float32", without: str = "") -> float | None:
    """Say, on the logger, how long work will take before it begins; nothing if it is done in a moment.

    Args:
        work: All of it.
        device: Where.
        width: Of the model.
        dtype: That it computes in.
        without: What is not in it.

    Returns:
        The seconds; None where they were not worth measuring.
    """
    if _SLOW.seconds(work) < _MOMENT:
        return None
    try:
        seconds = expected_seconds(work, device, width, dtype)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return None  # the work itself says what it lacks
    if seconds >= _MOMENT:
        _log.info("takes about %s on %s%s", duration(seconds), device, f", without {without}" if without else "")
    return seconds


def duration(seconds: float) -> str:
    """With two digits, for people: "12 minutes"."""
    units = (("second", 1, 100), ("minute", 60, 100), ("hour", 3600, 48), ("day", 86400, math.inf))
    unit, size = next((unit, size) for unit, size, most in units if seconds / size < most)
    count = max(1.0, seconds / size)
    digits = 0 if count >= 9.5 else 1
    rounded = round(count, digits)
    return f"{rounded:g} {unit}{'' if rounded == 1 else 's'}"
