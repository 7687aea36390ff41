"""Protocols: how a text becomes scored tokens. Perplexities are comparable only under the same protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attention.errors import Failure, Refusal

if TYPE_CHECKING:
    import torch

    from eval.inputs.text import Tokens

PROTOCOLS = ("paper", "bos", "sliding")


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

    def blocks(self, tokens: Tokens) -> list[Block]:
        """Cut `tokens` into blocks. A shorter last block is dropped, unless it is the only one or blocks overlap.

        Raises:
            Failure: The protocol begins every block with BOS, and the tokenizer has none.
        """
        import torch

        if self.bos == "block" and tokens.bos is None:
            raise Failure(
                f"protocol {self.name!r} opens every block with a BOS token, and the model's tokenizer adds none",
                hint="use --protocol paper",
            )
        opening = torch.tensor([] if tokens.bos is None else [tokens.bos], dtype=torch.long)
        if self.bos == "block":
            parts = tokens.ids.split(self.context - 1)
            blocks = [Block(torch.cat((opening, part)), 1) for part in parts]
        else:
            ids = torch.cat((opening, tokens.ids))
            starts = range(0, max(1, len(ids) - self.context + self.stride), self.stride)
            overlap = self.context - self.stride
            # The first token of the text has no context; later blocks score only their new tokens.
            blocks = [Block(ids[s : s + self.context], max(1, overlap) if s else 1) for s in starts]
        if self.stride == self.context and len(blocks) > 1 and len(blocks[-1].ids) < self.context:
            blocks.pop()
        return [block for block in blocks if len(block.ids) > block.first]


@dataclass(frozen=True)
class Block:
    """The `ids` of one forward pass; those from index `first` on are scored."""

    ids: torch.Tensor
    first: int
