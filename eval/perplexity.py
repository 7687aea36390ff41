"""Perplexity under a named protocol, and the distance of a model from its source (KL, top-1 agreement).

Sums of nats are accumulated in fp64 over fp32 log-probabilities and divided once; nothing is averaged per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.functional import nll_loss

from attention.errors import Failure
from eval.device import input_device
from eval.positions import ByPosition
from eval.protocol import Block, Protocol
from eval.text import Tokens

# Most logits per forward pass, in values (128 MB in fp32): limits the blocks per batch.
_LOGITS_AT_ONCE = 2**25
# Most logits per comparison, which needs several fp32 copies.
_ROWS_AT_ONCE = 2**24


@dataclass
class Score:
    """Running sums over scored tokens: nats, KL(source ‖ model), argmax agreement with the source."""

    nats: float = 0.0
    tokens: int = 0
    kl: float = 0.0
    agreed: int = 0
    by_position: ByPosition = field(default_factory=ByPosition)

    def add(self, found: torch.Tensor, expected: torch.Tensor | None, targets: torch.Tensor, positions: torch.Tensor) -> None:
        """Add fp32 log-probabilities `found [N, vocabulary]` at `targets [N]`, compared with the source's, `expected`.

        If `expected` is None, `found` is the source's own. `positions [N]` are those of the tokens before the targets.
        """
        nats = nll_loss(found, targets.to(found.device), reduction="none")
        self.nats += nats.double().sum().item()
        self.by_position.add(nats, positions)
        self.tokens += targets.numel()
        if expected is None:
            self.agreed += targets.numel()
        else:
            self.kl += (expected.exp() * (expected - found)).sum(-1).double().sum().item()
            self.agreed += int((expected.argmax(-1) == found.argmax(-1)).sum())

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

    def bits_per_byte(self, tokens: Tokens) -> float:
        """Mean loss in bits times tokens per byte of text: comparable between tokenizers."""
        return self.loss / math.log(2) * tokens.per_byte

    def as_figures(self, tokens: Tokens, source: Score) -> dict[str, Any]:
        """The quality part of one report entry."""
        return {
            "perplexity": self.perplexity,
            "loss_nats": self.loss - source.loss,
            "bits_per_byte": self.bits_per_byte(tokens),
            "tokens": self.tokens,
            "kl_to_source": self.kl / self.tokens,
            "top1_agreement": self.agreed / self.tokens,
            "loss_by_position": self.by_position.as_figures(source.by_position),
        }


def compare(
    source: Any, models: Sequence[Any], blocks: list[Block], progress: Callable[[int], object] = lambda tokens: None
) -> list[Score]:
    """Score the source and converted models on the same blocks.

    Args:
        source: A causal LM in eval mode.
        models: Other models with the same vocabulary; may be empty.
        blocks: From `Protocol.blocks`.
        progress: Called with the number of tokens newly scored.

    Returns:
        The source's score, then each model's score against it.

    Raises:
        Failure: A model's logits are not finite.
    """
    scores = [Score() for _ in (source, *models)]
    vocabulary = source.config.get_text_config(decoder=True).vocab_size
    with torch.inference_mode():
        for ids, first in _batches(blocks, vocabulary):
            scored = _Scored(ids[:, first:].flatten(), torch.arange(first - 1, ids.shape[1] - 1).repeat(len(ids)))
            expected = _logits(source, ids, first)
            _add(scores[0], source, expected, None, scored, vocabulary)
            for score, model in zip(scores[1:], models, strict=True):  # hold one model's logits at a time
                _add(score, model, _logits(model, ids, first), (source, expected), scored, vocabulary)
            progress(len(scored.targets))
    return scores


class _Scored(NamedTuple):
    """The tokens of a batch that are scored, `[N]`, and the positions in their blocks of the tokens before them, `[N]`."""

    targets: torch.Tensor
    positions: torch.Tensor


def _add(
    score: Score,
    model: Any,
    logits: torch.Tensor,
    expected: tuple[Any, torch.Tensor] | None,
    scored: _Scored,
    vocabulary: int,
) -> None:
    """Add `logits [N, vocabulary]` to the score, compared with the source's, `expected`, some rows at a time."""
    for start in range(0, len(scored.targets), rows := max(1, _ROWS_AT_ONCE // vocabulary)):
        part = slice(start, start + rows)
        found = _log_probabilities(logits[part], model)
        before = None if expected is None else _log_probabilities(expected[1][part], expected[0]).to(found.device)
        score.add(found, before, scored.targets[part], scored.positions[part])


def _batches(blocks: list[Block], vocabulary: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Blocks of one shape stacked to `[B, T]`, as many as the limit allows, with the index of the first scored token."""
    waiting: list[Block] = []
    for block in [*blocks, None]:
        full = waiting and (len(waiting) + 1) * len(waiting[0].ids) * vocabulary > _LOGITS_AT_ONCE
        alike = waiting and block and (len(block.ids), block.first) == (len(waiting[0].ids), waiting[0].first)
        if waiting and (full or not alike):
            yield torch.stack([w.ids for w in waiting]), waiting[0].first
            waiting = []
        if block:
            waiting.append(block)


def _logits(model: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Logits `[N, vocabulary]`, in the model's dtype, at the N scored positions of `ids [B, T]`."""
    return model(input_ids=ids.to(input_device(model)), use_cache=False).logits[:, first - 1 : -1].flatten(0, 1)


def _log_probabilities(logits: torch.Tensor, model: Any) -> torch.Tensor:
    """fp32 log-probabilities of some rows of logits."""
    if not torch.isfinite(logits).all():
        dtype = str(model.dtype).removeprefix("torch.")
        raise Failure(
            f"the logits of {model.name_or_path} are not finite in {dtype}",
            hint="evaluate in another --dtype (float32 is safest); if they still are not, its weights are damaged",
        )
    return logits.float().log_softmax(-1)


def protocol_record(protocol: Protocol, tokens: Tokens, dtype: str) -> dict[str, Any]:
    """The protocol part of a report: everything that a figure depends on besides the model."""
    return {
        **asdict(protocol),
        "dtype": dtype,
        "text": tokens.name,
        "text_hash": tokens.hash,
        "tokens": len(tokens.ids),
        "bytes_in_text": tokens.text_bytes,
    }
