"""Perplexity under a named protocol, and the distance of a model from its source (KL, top-1 agreement).

A protocol says how a text becomes scored tokens. Perplexities are comparable only under the same one.

Sums of nats are accumulated in fp64 over fp32 log-probabilities and divided once; nothing is averaged per sequence.

An average over a block hides what happens late in it: a converted model that has lost rotary components may predict as well as
its source after a hundred tokens, and much worse after a thousand. So the loss is shown by position, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import nll_loss

from attention.errors import Failure, Refusal
from eval.inputs.text import Tokens
from eval.machine.device import input_device
from eval.quality.settings import PROTOCOLS

# Most logits per forward pass, in values (128 MB in fp32): limits the blocks per batch.
_LOGITS_AT_ONCE = 2**25
# Most logits per comparison, which needs several fp32 copies.
_ROWS_AT_ONCE = 2**24


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


@dataclass
class Score:
    """Running sums over scored tokens: nats, KL(source ‖ model), argmax agreement with the source, and acceptance.

    Acceptance is Σ min(p, q): how likely the source accepts a token that the model drafts (speculative sampling, arXiv
    2211.17192).
    """

    nats: float = 0.0
    tokens: int = 0
    kl: float = 0.0
    agreed: int = 0
    accepted: float = 0.0

    def add(self, batch: Batch, logits: torch.Tensor, expected: torch.Tensor | None = None) -> None:
        """Add a model's `logits [N, vocabulary]`, compared with the source's, `expected`; None if they are its own."""
        for start in range(0, len(batch.targets), rows := max(1, _ROWS_AT_ONCE // logits.shape[1])):
            part = slice(start, start + rows)
            targets, found = batch.targets[part], logits[part].float().log_softmax(-1)
            self.nats += nll_loss(found, targets.to(found.device), reduction="none").double().sum().item()
            self.tokens += targets.numel()
            if expected is None:
                self.agreed += targets.numel()
                self.accepted += targets.numel()
                continue
            source = expected[part].to(logits.device).float().log_softmax(-1)
            self.kl += (source.exp() * (source - found)).sum(-1).double().sum().item()
            self.agreed += int((source.argmax(-1) == found.argmax(-1)).sum())
            self.accepted += torch.minimum(source, found).exp().sum(-1).double().sum().item()

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            raise Failure(f"perplexity overflows at {self.loss:.0f} nats per token: the model's output is garbage") from None

    def as_figures(self, tokens: Tokens, source: Score) -> dict[str, Any]:
        """The quality part of one report entry."""
        return {
            "perplexity": self.perplexity,
            "loss_nats": self.loss - source.loss,
            "bits_per_byte": self.loss / math.log(2) * tokens.per_byte,  # comparable between tokenizers
            "tokens": self.tokens,
            "kl_to_source": self.kl / self.tokens,
            "top1_agreement": self.agreed / self.tokens,
            "acceptance": self.accepted / self.tokens,
        }


def batches(blocks: Iterable[Batch], vocabulary: int) -> Iterator[Batch]:
    """The same blocks, as many together as the limit on logits allows."""
    for ids, first in blocks:
        at_once = max(1, _LOGITS_AT_ONCE // (ids.shape[1] * vocabulary))
        yield from (Batch(part, first) for part in ids.split(at_once))


def logits_of(model: Any, batch: Batch, **given: Any) -> torch.Tensor:
    """Logits `[N, vocabulary]`, in the model's dtype, at the N scored positions; `given` are further arguments of its forward.

    Raises:
        Failure: They are not finite.
    """
    logits = model(**{"input_ids": batch.ids.to(input_device(model)), "use_cache": False} | given).logits
    return finite(logits[:, batch.first - 1 : -1].flatten(0, 1), model)


def finite(logits: torch.Tensor, model: Any) -> torch.Tensor:
    """`logits` of a model.

    Raises:
        Failure: They are not finite.
    """
    if not torch.isfinite(logits).all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise Failure(
            f"the logits of {model.name_or_path} are not finite in {dtype}",
            hint="evaluate in another --dtype (float32 is safest); if they still are not, its weights are damaged",
        )
    return logits
