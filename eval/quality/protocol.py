"""Protocols: how a text becomes scored tokens. Perplexities are comparable only under the same protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from attention.errors import Failure, Refusal
from eval.inputs.text import Tokens
from eval.quality.settings import PROTOCOLS


@dataclass(frozen=True)
class Protocol:
    """A rule for how a text becomes scored tokens.

    Attributes:
        name: "paper": consecutive blocks, as in papers. "bos": the same, but each block begins with BOS.
            "sliding": blocks overlap by half, so that every token has context.
        context: Tokens per block, BOS included.
        stride: New tokens that each block scores; `context` if blocks do not overlap.
        bos: "start": the text begins with BOS if the tokenizer adds one. "block": every block begins with BOS.
    """

    name: str
    context: int
    stride: int
    bos: Literal["start", "block"]

    @classmethod
    def named(cls, name: str, context: int) -> Protocol:
        """One of `PROTOCOLS` at a context length."""
        if name not in PROTOCOLS:
            raise Refusal(f"no protocol {name!r} (choose {', '.join(PROTOCOLS)})")
        if context < 2:
            raise Refusal(f"a context of {context} predicts nothing: it must be at least 2 tokens")
        if name == "sliding":
            return cls(name, context, context // 2, "start")
        return cls(name, context, context, "block" if name == "bos" else "start")

    def blocks(self, tokens: Tokens) -> list[Batch]:
        """Cut `tokens` into blocks, by shape. A shorter last block is dropped, unless it is the only one or blocks overlap.

        Raises:
            Failure: The protocol begins every block with BOS, and the tokenizer has none.
        """
        every = self.bos == "block"
        if every and tokens.bos is None:
            raise Failure(
                f"protocol {self.name!r} opens every block with a BOS token, and the model's tokenizer adds none",
                hint="use --protocol paper",
            )
        opening = torch.tensor([] if tokens.bos is None else [tokens.bos], dtype=torch.long)
        ids = tokens.ids if every else torch.cat((opening, tokens.ids))
        size = self.context - every
        step = min(self.stride, size)
        first = max(1, size - step)  # the first token of the text has no context; later blocks score only their new tokens
        count = max(0, (len(ids) - size) // step + 1)
        whole = ids.unfold(0, size, step) if count else ids.new_empty(0, size)
        parts = [(whole, 1)] if first == 1 else [(whole[:1], 1), (whole[1:], first)]
        if step < size or not count:
            parts.append((ids[None, count * step :], first if count else 1))
        if every:
            parts = [(torch.cat((opening.expand(len(part), 1), part), 1), 1) for part, _ in parts]
        return [Batch(part.contiguous(), first) for part, first in parts if len(part) and part.shape[1] > first]


class Batch(NamedTuple):
    """Blocks of one shape, each for a forward pass.

    Attributes:
        ids: `[B, T]`.
        first: The index of the first scored token of each block.
    """

    ids: torch.Tensor
    first: int

    @property
    def targets(self) -> torch.Tensor:
        """The N scored tokens, `[N]`."""
        return self.ids[:, self.first :].flatten()
