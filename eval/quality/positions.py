"""Loss by position: how far into a block a token is predicted, in buckets that double.

An average over a block hides what happens late in it: a converted model that has lost rotary components may predict as well as
its source after a hundred tokens, and much worse after a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_FIRST = 128  # tokens; each further bucket ends at twice the end of the one before


@dataclass
class ByPosition:
    """Running sums over scored tokens, by the index of the last token that the model sees before each.

    Attributes:
        nats: Of each bucket.
        tokens: Their number.
    """

    nats: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, nats: torch.Tensor, positions: torch.Tensor) -> None:
        """Add the loss `nats [N]` of some tokens; `positions [N]` are those of the tokens before them."""
        numbers = buckets_of(positions)
        for number in numbers.unique().tolist():
            chosen = numbers == number
            missing = number + 1 - len(self.nats)
            self.nats += [0.0] * missing
            self.tokens += [0] * missing
            self.nats[number] += nats[chosen.to(nats.device)].double().sum().item()
            self.tokens[number] += int(chosen.sum())

    def as_figures(self, source: ByPosition) -> list[dict[str, Any]]:
        """One entry for each bucket with tokens: its bounds, their number, and the mean loss less the source's."""
        return [
            {"from": start, "to": end, "tokens": count, "loss_nats": (nats - before) / count}
            for (start, end), nats, before, count in zip(
                map(bounds, range(len(self.nats))), self.nats, source.nats, self.tokens, strict=True
            )
            if count
        ]


def buckets_of(positions: torch.Tensor) -> torch.Tensor:
    """The number of the bucket of each position: 0 below 128, 1 below 256, 2 below 512, …"""
    return torch.frexp((positions // _FIRST).double()).exponent.long()  # 0 → 0, 1 → 1, 2 and 3 → 2, 4 to 7 → 3, …


def bounds(number: int) -> tuple[int, int]:
    """The first position of a bucket, and the first one after it."""
    return (_FIRST * 2 ** (number - 1) if number else 0), _FIRST * 2**number
