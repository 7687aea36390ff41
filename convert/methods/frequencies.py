"""What each layer may keep, decided for all layers together: which frequencies turn, and how a budget is split.

Pure: it sees sizes and the losses that the survey found, no weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pairs_by_loss(losses: Sequence[torch.Tensor], count: int) -> tuple[int, ...]:
    """The frequencies that go on turning, one list for all layers, since a config has one.

    Every layer's losses are normalised to one and summed; each frequency keeps as many components as it has among the
    `count` largest sums. Every layer then turns its own most costly components of each frequency.

    Args:
        losses: Per layer `[L, G]`, what not turning component j of frequency l would cost, largest first in each row.
        count: P/2.

    Returns:
        `count` frequencies, ascending, one for each component.
    """
    total = sum(table.double() / table.double().sum().clamp_min(torch.finfo(torch.float64).tiny) for table in losses)
    assert isinstance(total, torch.Tensor)
    chosen = total.flatten().argsort(descending=True, stable=True)[:count] // total.shape[1]
    return tuple(sorted(chosen.tolist()))


def pairs_by_stride(rope_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """P/2 frequencies spread evenly over the D/2 of the source, those of DeepSeek's own RoPE of dim P where P divides D."""
    return tuple(pair * rotary_dim // rope_dim for pair in range(rope_dim // 2))
