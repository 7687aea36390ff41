"""Recall: does a model still copy what it has read, over a distance? Needs no data set and no instruction tuning.

A run of tokens, drawn independently with the frequencies that they have in the text, is read twice, with a part of the text in
between. Nothing but the first copy can predict the second: its loss shows how well attention finds a token again. Perplexity
hardly shows it, because most tokens are predicted from near ones.

The second copy's loss rises from the first's value (nothing is found) towards 0 (all is found) with the model's skill at
induction: Olsson et al., "In-context learning and induction heads" (2022), measure it with repeated random tokens, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import nll_loss

from attention.errors import Refusal
from eval.device import input_device, memory_for
from eval.forecast import Decoder, Work
from eval.perplexity import finite
from eval.progress import Progress, stage
from eval.source import Source, position_limit
from eval.text import Tokens

if TYPE_CHECKING:
    from eval.evaluation import EvaluationSettings

COPY = 64  # tokens of a copy
_NEAREST, _FARTHEST = 128, 8192  # distances from a token to its copy; each is twice the one before
_TOKENS = 8192  # to read at each distance
_FEWEST = 4  # sequences at each distance


@dataclass(frozen=True)
class Recall:
    """The probe for some models.

    Attributes:
        copies: Runs of tokens, `[S, COPY]`.
        text: Tokens between them, `[n]`.
        distances: From a token to its copy.
        opening: The BOS token if the tokenizer adds one, `[1 or 0]`; every sequence begins with it.
    """

    name: ClassVar[str] = "recall"
    copies: torch.Tensor
    text: torch.Tensor
    distances: tuple[int, ...]
    opening: torch.Tensor

    @classmethod
    def asked(cls, settings: EvaluationSettings, sources: Sequence[Source], tokens: Tokens) -> Recall | None:
        """See `eval.probes.Probe`.

        Raises:
            Refusal: The models' positions or the text are too short for the least distance.
        """
        if not settings.recall:
            return None
        most = _FARTHEST + COPY + 1
        return cls.of(tokens.ids, min(most, position_limit(sources) or most), tokens.bos)

    @classmethod
    def of(cls, ids: torch.Tensor, positions: int, bos: int | None = None) -> Recall:
        """The probe on a text's `ids [n]` for models of so many positions. The same arguments give the same tokens."""
        opening = ids.new_tensor([] if bos is None else [bos])
        distances = _distances(min(positions - len(opening), len(ids) + 2 * COPY))
        if not distances:
            raise Refusal(
                f"recall needs models of at least {_NEAREST + COPY} positions and a text of {_NEAREST - COPY} tokens, "
                f"not {positions} and {len(ids)}",
                hint="leave out --recall, or give more of a text",
            )
        generator = torch.Generator().manual_seed(0)
        frequencies = torch.bincount(ids).double()
        drawn = frequencies.multinomial(max(map(_sequences, distances)) * COPY, replacement=True, generator=generator)
        return cls(drawn.view(-1, COPY), ids, tuple(distances), opening)

    def record(self) -> dict[str, Any]:
        """What the figures depend on besides the model."""
        return {"copy_tokens": COPY, "sequences": {str(distance): _sequences(distance) for distance in self.distances}}

    def measure(self, model: Any, name: str, progress: Progress) -> dict[str, Any]:
        """Mean nats per token of the first copies, and of the second ones at each distance.

        Returns:
            `{"first_nats", "distances": [{"distance", "tokens", "nats"}]}`. The first token of a copy is not scored: nothing
            before it tells that a copy begins.

        Raises:
            Failure: Logits are not finite, or memory does not suffice.
        """
        total = sum(_sequences(distance) for distance in self.distances)
        room = memory_for("the recall probe", "free some, give --device cpu, or leave out --recall")
        with torch.inference_mode(), room, stage(progress, f"recall of {name}", total, "sequence") as done:
            first = torch.stack([self._nats(model, copy, copy) for copy in self.copies])
            found = []
            for distance in self.distances:
                nats = []
                for number in range(_sequences(distance)):
                    copy = self.copies[number]
                    nats.append(self._nats(model, torch.cat((copy, self._between(number, distance), copy)), copy))
                    done(1)
                scores = torch.cat(nats)
                found.append({"distance": distance, "tokens": len(scores), "nats": scores.mean().item()})
        return {"first_nats": first.mean().item(), "distances": found}

    def _between(self, number: int, distance: int) -> torch.Tensor:
        """The tokens of the text between the copies of a sequence: spread over the text."""
        length = distance - COPY
        start = number * (len(self.text) - length) // _sequences(distance)
        return self.text[start : start + length]

    def _nats(self, model: Any, ids: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """The loss `[COPY − 1]`, fp64, of all but the first token of `copy`, with which `ids [T]` ends."""
        logits = finite(_last_logits(model, torch.cat((self.opening, ids)), len(copy))[:-1], model)
        return nll_loss(logits.float().log_softmax(-1), copy[1:].to(logits.device), reduction="none").double().cpu()


def work_of(decoder: Decoder, tokens: int, positions: int | None) -> Work:
    """The work of the probe on one model of so many positions (None: of any number), with a text of so many tokens."""
    work = decoder.forward(_sequences(_NEAREST) * COPY, COPY)  # of first copies
    room = tokens + 2 * COPY
    for distance in _distances(room if positions is None else min(positions, room)):
        count, length = _sequences(distance), distance + COPY
        work += decoder.forward(count * length, length, count * COPY)
    return work


def _distances(room: int) -> list[int]:
    """From a token to its copy, in sequences of at most so many tokens."""
    distances, distance = [], _NEAREST
    while distance <= _FARTHEST and distance + COPY <= room:
        distances.append(distance)
        distance *= 2
    return distances


def _sequences(distance: int) -> int:
    return max(_FEWEST, _TOKENS // distance)


def _last_logits(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Logits `[count, vocabulary]` at the last positions of `ids [T]`; those of all would take gigabytes."""
    few = {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits: torch.Tensor = model(input_ids=ids[None].to(input_device(model)), use_cache=False, **few).logits
    return logits[0, -count:]
