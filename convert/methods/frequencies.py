"""Which frequencies stay rotary, decided for all layers together.

Functions of sizes and of what was measured for each layer; no weights.
"""

from collections.abc import Callable, Sequence

import torch

_TRIED = 6  # frequencies on either side


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
    return tuple(sorted(_ranked(losses)[:count]))


def _ranked(losses: Sequence[torch.Tensor]) -> list[int]:
    """The frequencies of all components, the costliest first."""
    total = torch.stack(list(losses)).sum(0)
    return (total.flatten().argsort(descending=True, stable=True) // total.shape[1]).tolist()


def pairs_by_trial(
    losses: Sequence[torch.Tensor], count: int, errors: Callable[[list[list[int]]], list[float]]
) -> tuple[int, ...]:
    """As `pairs_by_loss`, with some frequencies exchanged by what outputs lose.

    Losses are of logits, one frequency at a time, and blind to what the softmax makes of them. So the close ones are tried:
    without one component of each of the last that are kept, and with one more of each of the next. As if these errors added
    up, the largest gains replace the smallest costs.

    Args:
        losses: As of `pairs_by_loss`.
        count: P/2.
        errors: Maps choices to what outputs lose.
    """
    ranked = _ranked(losses)
    kept, others = ranked[:count], [*dict.fromkeys(ranked[count:])][:_TRIED]
    places = sorted({pair: place for place, pair in enumerate(kept)}.values())[-_TRIED:]  # of the last component of each
    if count == 1 or not others:  # nothing rotates without the one, or nothing is left
        return tuple(sorted(kept))
    whole, *changed = errors([kept, *(kept[:i] + kept[i + 1 :] for i in places), *([*kept, pair] for pair in others)])
    costs = sorted((lost - whole, place) for lost, place in zip(changed, places, strict=False))
    gains = sorted(((whole - lost, pair) for lost, pair in zip(changed[len(places) :], others, strict=True)), reverse=True)
    for (cost, place), (gain, pair) in zip(costs, gains, strict=False):
        kept[place] = pair if gain > cost else kept[place]
    return tuple(sorted(kept))


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
