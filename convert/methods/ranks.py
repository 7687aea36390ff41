"""Shares out the ranks of latents among layers: where a rank saves most, it goes.

A layer's cost is the squared error of its attention's output, relative to the residual stream that it is added to. Costs of
layers add up, as if errors were independent. docs/notes/fits.md compares other weights of errors.
"""

import math
from collections.abc import Sequence

_MEASURED = 6  # ranks, between which costs are interpolated


def measured_ranks(ranks: Sequence[int]) -> list[int]:
    """A few of `ranks`, about evenly spread by their logarithm: the first, the last and some between."""
    low, high = math.log(ranks[0]), math.log(ranks[-1])
    wanted = [math.exp(low + (high - low) * i / (_MEASURED - 1)) for i in range(_MEASURED)]
    return sorted({min(ranks, key=lambda rank: abs(rank - value)) for value in wanted})


def interpolated(measured: Sequence[int], costs: Sequence[float], ranks: Sequence[int]) -> list[float]:
    """The cost at each of `ranks`, whose logarithm is linear between those measured, and which no rank raises."""
    tiny = 1e-300
    falling = [math.log(max(min(costs[: i + 1]), tiny)) for i in range(len(costs))]
    found = []
    for rank in ranks:
        after = next(i for i, known in enumerate(measured) if known >= rank)
        before = max(0, after - 1)
        width = measured[after] - measured[before]
        share = (rank - measured[before]) / width if width else 1.0
        found.append(math.exp((1 - share) * falling[before] + share * falling[after]))
    return found


def shared_out(
    costs: Sequence[Sequence[float]], ranks: Sequence[int], prices: Sequence[int], total: int, tokens: Sequence[int] = ()
) -> tuple[int, ...]:
    """A rank for each layer, with the least summed cost that a greedy choice finds.

    Args:
        costs: The cost of each layer at each of `ranks`, falling.
        ranks: Rising.
        prices: What each of `ranks` takes of `total` for a token, such as bytes of the cache; rising.
        total: The most that the layers may take; at least the first price for each of their tokens.
        tokens: Those that each layer holds; one each if there are none.

    Every layer begins with the first rank. Then the layer whose cost falls most for its price has more, as far as its cost
    falls so steeply.
    """
    tokens = tokens or [1] * len(costs)
    at, left = [0] * len(costs), total - prices[0] * sum(tokens)
    while True:
        steps = []
        for layer, now in enumerate(at):
            for step in range(now + 1, len(ranks)):
                price = tokens[layer] * (prices[step] - prices[now])
                if price <= left:
                    steps.append(((costs[layer][now] - costs[layer][step]) / price, -layer, -step, price))
        if not steps:
            return tuple(ranks[i] for i in at)
        _, layer, step, price = max(steps)
        at[-layer], left = -step, left - price
