"""Recall: does a model still copy what it has read, over a distance? Needs no data set and no instruction tuning.

Runs of tokens, drawn independently with the frequencies that they have in a text, stand in that text twice, at several
distances. Nothing but the first copy can predict the second: its loss shows how well attention finds a token again. Perplexity
hardly shows it, because most tokens are predicted from near ones.

Pairs lie near the beginning of the sequence, as far as their distance allows: beyond the length that a conversion was
calibrated in, a model may find nothing at any distance. One pair for each distance leaves most of the sequence to the text: in
one that is half random, a converted model finds less.

The second copy's loss rises from the first's value (nothing is found) towards 0 (all is found) with the model's skill at
induction: Olsson et al., "In-context learning and induction heads" (2022), measure it with repeated random tokens, too.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from attention.errors import Refusal
from eval.inputs.source import Source, position_limit
from eval.inputs.text import Tokens
from eval.machine.device import input_device, memory_for
from eval.quality.perplexity import finite
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, stage

COPY = 64  # tokens of a copy
_NEAREST, _FARTHEST = 128, 8192  # distances from a token to its copy; each is twice the one before
_OPENING = 1024  # tokens within which a pair lies, or within twice its distance
_TOKENS = 16384  # to read, in as many sequences
_FEWEST = 4  # sequences


@dataclass(frozen=True)
class Reading:
    """A sequence to read, and what to score in it.

    Attributes:
        ids: Its tokens, `[T]`.
        copies: Positions of a run's tokens for each distance, `[distances, 2, COPY]`: first copy, second copy.
    """

    ids: torch.Tensor
    copies: torch.Tensor


@dataclass(frozen=True)
class Recall:
    """The probe for some models.

    Attributes:
        sequences: To read, each in one pass.
        distances: From a token to its copy.
    """

    sequences: tuple[Reading, ...]
    distances: tuple[int, ...]

    @classmethod
    def asked(cls, settings: EvaluationSettings, sources: Sequence[Source], tokens: Tokens) -> Recall | None:
        """The probe, or None if the settings do not ask for it.

        Raises:
            Refusal: The models' positions or the text are too short for the least distance.
        """
        if not settings.recall:
            return None
        most = _FARTHEST + COPY + 1
        return cls.of(tokens.ids, min(most, position_limit(sources) or most), tokens.bos)

    @classmethod
    def of(cls, ids: torch.Tensor, positions: int, bos: int | None = None) -> Recall:
        """The probe on a text's `ids [n]` for models of so many positions. The same arguments give the same tokens.

        Every sequence begins with the tokenizer's BOS token if it has one.
        """
        opening = ids.new_tensor([] if bos is None else [bos])
        distances = _distances(min(positions - len(opening), len(ids) + 2 * COPY))
        if not distances:
            raise Refusal(
                f"recall needs models of at least {_NEAREST + COPY} positions and a text of {_NEAREST - COPY} tokens, "
                f"not {positions} and {len(ids)}",
                hint="leave out --recall, or give more of a text",
            )
        generator = torch.Generator().manual_seed(0)
        count = max(_FEWEST, _TOKENS // (distances[-1] + COPY))
        between = distances[-1] - COPY
        starts = [number * (len(ids) - between) // count for number in range(count)]
        texts = [ids[start : start + between] for start in starts]
        return cls(tuple(_reading(opening, text, ids, distances, generator) for text in texts), tuple(distances))

    def conditions(self) -> dict[str, Any]:
        """Conditions of the figures besides the model."""
        return {"copy_tokens": COPY, "pairs": {str(distance): len(self.sequences) for distance in self.distances}}

    def measure(self, model: Any, name: str, progress: Progress) -> dict[str, Any]:
        """Mean nats per token of the first copies, and of the second ones at each distance.

        Returns:
            `{"first_nats", "distances": [{"distance", "tokens", "nats"}]}`. The first token of a copy is not scored: nothing
            before it tells that a copy begins.

        Raises:
            Failure: Logits are not finite, or memory does not suffice.
        """
        first, second = list[torch.Tensor](), defaultdict[int, list[torch.Tensor]](list)
        room = memory_for("the recall probe", "free some, give --device cpu, or leave out --recall")
        with torch.inference_mode(), room, stage(progress, f"recall of {name}", len(self.sequences), "sequence") as done:
            for sequence in self.sequences:
                for distance, (read, again) in zip(self.distances, _nats(model, sequence), strict=True):
                    first.append(read)
                    second[distance].append(again)
                done(1)
        scores = {distance: torch.cat(second[distance]) for distance in self.distances}
        found = [{"distance": distance, "tokens": len(nats), "nats": nats.mean().item()} for distance, nats in scores.items()]
        return {"first_nats": torch.cat(first).mean().item(), "distances": found}


def _distances(room: int) -> list[int]:
    """From a token to its copy, in sequences of at most so many tokens."""
    doubled = (_NEAREST * 2**power for power in range((_FARTHEST // _NEAREST).bit_length()))
    return [distance for distance in doubled if distance + COPY <= room]


def _reading(
    opening: torch.Tensor, text: torch.Tensor, ids: torch.Tensor, distances: list[int], generator: torch.Generator
) -> Reading:
    """A text with copies in it, at its ends and at random positions, of tokens drawn from `ids`."""
    pairs = _pairs(distances, generator)
    drawn = torch.bincount(ids).double().multinomial(len(pairs) * COPY, replacement=True, generator=generator)
    body = torch.cat((text.new_empty(COPY), text, text.new_empty(COPY)))
    positions = torch.tensor(pairs)[..., None] * COPY + torch.arange(COPY)
    body[positions] = drawn.view(-1, 1, COPY).to(body)
    return Reading(torch.cat((opening, body)), positions + len(opening))


def _pairs(distances: list[int], generator: torch.Generator) -> list[tuple[int, int]]:
    """Where the two copies for each distance stand, counted in runs of `COPY` tokens. The farthest are at both ends."""
    free, pairs = set(range(distances[-1] // COPY + 1)), []
    for distance in reversed(distances):
        apart, last = distance // COPY, max(_OPENING, 2 * distance) // COPY
        starts = sorted(start for start in free if start + apart in free and start + apart < last)
        start = starts[int(torch.randint(len(starts), (), generator=generator))]
        pairs.append((start, start + apart))
        free -= set(pairs[-1])
    return pairs[::-1]


def _nats(model: Any, sequence: Reading) -> torch.Tensor:
    """The loss `[pairs, 2, COPY − 1]`, fp64, of all but the first token of each copy."""
    positions = sequence.copies[..., :-1]
    wanted = sequence.ids[positions + 1]
    logits = finite(_logits(model, sequence.ids, positions.flatten()), model)
    losses = cross_entropy(logits.float(), wanted.flatten().to(logits.device), reduction="none")
    return losses.view(wanted.shape).double().cpu()


def _logits(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits `[positions, vocabulary]` at some of `ids [T]`; those of all take gigabytes, where a class makes no others."""
    device = input_device(model)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return model(input_ids=ids[None].to(device), use_cache=False).logits[0, positions]
    logits: torch.Tensor = model(input_ids=ids[None].to(device), use_cache=False, logits_to_keep=positions.to(device)).logits
    return logits[0]
