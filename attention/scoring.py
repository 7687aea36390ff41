"""Changes to a head's scaled logits before they are attention, besides that no token sees a later one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Scoring:
    """How one layer turns scaled logits into attention.

    Attributes:
        slopes: H numbers, or None: a head's slope, times the position of the key, is added to its scaled logits (ALiBi, arXiv
            2108.12409; less the position of the query, which cancels in the softmax).
        window: How many tokens a token sees, itself included; None for all before it.
        softcap: c, or None: logits l become c tanh(l / c) (Gemma 2, arXiv 2408.00118).
    """

    slopes: tuple[float, ...] | None = None
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and self.slopes is not None:
            raise ValueError("no class caps logits with ALiBi: whether slopes come before the cap is not known")

    def of(self, heads: slice) -> Scoring:
        """The same for some of the heads."""
        return self if self.slopes is None else replace(self, slopes=self.slopes[heads])

    def probabilities(
        self, logits: torch.Tensor, tokens: torch.Tensor | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention `[…, t, s]`; rows sum to one, or to less with sinks.

        Args:
            logits: `[…, t, s]`, scaled, with what slopes add, for tokens 0 … s − 1.
            tokens: `[t]`, the positions of the queries; None for the last t.
            sinks: `[…]`, a further logit of each head, of which nothing is read; None without.
        """
        import torch

        queries, keys = logits.shape[-2:]
        slots = torch.arange(keys, device=logits.device)
        position = (slots[keys - queries :] if tokens is None else tokens)[:, None]
        hidden = slots > position
        if self.window is not None:
            hidden |= slots <= position - self.window
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logits = logits.masked_fill(hidden, -torch.inf)
        if sinks is None:
            return logits.softmax(-1)
        return torch.cat((logits, sinks[..., None, None].expand(*logits.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


PLAIN = Scoring()
