"""Which frequencies stay rotary, decided for all layers together.

Pure functions of sizes and of the losses that were measured per layer; no weights.
"""

from collections.abc import Sequence

import torch


def pairs_by_loss(losses: Sequence[torch.Tensor], count: int) -> tuple[int, ...]:
    """The frequencies that stay rotary: one list of their numbers for all layers, since a config holds only one.

    Every layer then rotates its own costliest components of each frequency: as many as the frequency has among the `count`
    largest sums over layers.

    Args:
        losses: Per layer `[L, G]`, the cost of not rotating component j of frequency l, largest first in each row.
        count: P/2.

    Returns:
        `count` frequencies, ascending, one for each component.
    """
    total = torch.stack(list(losses)).sum(0)
    chosen = total.flatten().argsort(descending=True, stable=True)[:count] // total.shape[1]
    return tuple(sorted(chosen.tolist()))


def pairs_on_ladder(losses: Sequence[torch.Tensor], count: int) -> tuple[int, ...]:
    """Every s-th frequency from the first on, where s is the stride that loses least: a power of two, or the largest.

    RoPE's frequencies are a geometric ladder, and so are these: a base and their number say all about them.
    """
    if count == 1:
        return (0,)
    total = torch.stack(list(losses)).sum(0)[:, 0]
    most = (len(total) - 1) // (count - 1)
    strides = sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})
    ladders = [tuple(range(0, stride * count, stride)) for stride in strides]
    return max(ladders, key=lambda pairs: float(total[list(pairs)].sum()))


def shares(table: torch.Tensor) -> torch.Tensor:
    """A layer's losses as shares of their sum, fp64: layers count alike, however large their logits are."""
    return table.double() / table.double().sum().clamp_min(torch.finfo(torch.float64).tiny)


def pairs_by_stride(rope_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """P/2 frequencies spread evenly over the source's D/2; where P divides D, those of DeepSeek's own RoPE of dim P."""
    return tuple(pair * rotary_dim // rope_dim for pair in range(rope_dim // 2))
