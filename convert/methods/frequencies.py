"""Which frequencies stay rotary, decided for all layers together.

Pure functions of sizes and of the losses that were measured per layer; no weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pairs_by_loss(losses: Sequence[torch.Tensor], count: int) -> tuple[int, ...]:
    """The frequencies that stay rotary: one list of their numbers for all layers, since a config holds only one.

    Each layer's losses are normalised to a sum of one, then added up; a frequency keeps as many components as it has among the
    `count` largest sums. Every layer then rotates its own costliest components of each frequency.

    Args:
        losses: Per layer `[L, G]`, the cost of not rotating component j of frequency l, largest first in each row.
        count: P/2.

    Returns:
        `count` frequencies, ascending, one for each component.
    """
    total = sum(table.double() / table.double().sum().clamp_min(torch.finfo(torch.float64).tiny) for table in losses)
    assert isinstance(total, torch.Tensor)
    chosen = total.flatten().argsort(descending=True, stable=True)[:count] // total.shape[1]
    return tuple(sorted(chosen.tolist()))


def ladders(count: int, frequencies: int) -> list[tuple[float, ...]]:
    """Every s-th frequency from the first on, where s is a half, a power of two, or the largest that leaves `count` of them.

    RoPE's frequencies are a geometric ladder, and so are these: a base and their number say all about them. Steps of a half
    (`Rotary.select`) suit text with short distances, in which low frequencies hardly rotate and high ones deserve two keys.
    """
    if count == 1:
        return [(0,)]
    most = (frequencies - 1) // (count - 1)
    strides = sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
    return [tuple(stride * i for i in range(count)) for stride in (0.5, *strides)]


def pairs_by_stride(rope_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """P/2 frequencies spread evenly over the source's D/2; where P divides D, those of DeepSeek's own RoPE of dim P."""
    return tuple(pair * rotary_dim // rope_dim for pair in range(rope_dim // 2))
