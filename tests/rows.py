"""Which rows of a test over many `make test` runs; `make test-all` runs the others too."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

# One of each layout, norm, bias, window, residual and mixture of experts, for what costs more than a moment.
REPRESENTATIVES = (
    "llama", "phi3", "gpt_neox", "falcon", "bloom", "gpt2", "gpt_bigcode", "codegen", "mpt",  # layouts
    "qwen3_moe", "olmo2", "cohere", "stablelm",  # norms: shared, flat, a matrix, a list; experts
    "qwen2", "opt", "glm", "gemma2", "gpt_neo", "smollm3",  # biases, positions, pairs side by side, caps, windows, no RoPE
)  # fmt: skip


def rows(every: Iterable[Any], chosen: Sequence[Any] = REPRESENTATIVES) -> list[Any]:
    """Parameters for all rows; those not `chosen`, by themselves or by the last of their values, are marked `slow`."""
    every = list(every)
    fast = [row in chosen or (isinstance(row, tuple) and row[-1] in chosen) for row in every]
    assert any(fast), "no row is chosen"
    return [row if kept else _slow(row) for row, kept in zip(every, fast, strict=True)]


def _slow(row: Any) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
