"""Probes: what a model loses at every position, and whether it still finds what it has read.

Perplexity hardly shows either, because most tokens are predicted from near ones. Every sequence is read in chunks, over the
cache that the model has when it generates. `text` reads parts of the text as they are. The others put sentences into such parts
and ask for them later:

- `copy`: runs of tokens, drawn with the frequencies that they have in the text, stand twice. Nothing but the first copy can
  predict the second (Olsson et al., "In-context learning and induction heads", 2022).
- `key–value`: "The code of river is 48213." stands twice, and the second number is asked.
- `four codes`: four such sentences lie anywhere, and one sentence asks for all of them.
- `variables`: "VAR river = 48213", "VAR stone = VAR river", "VAR glass = VAR stone", and what the last one is. This task and
  the one before are small ones of RULER (arXiv 2404.06654).

An answer is exact if each of its tokens is the likeliest one: then greedy generation gives it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from attention.versions import CACHE, logits_kept
from eval.inputs.source import Source, position_limit
from eval.inputs.text import Tokens, encoded
from eval.machine.device import input_device, memory_for
from eval.quality.perplexity import finite
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, stage

RUN = 64  # tokens of a copy, and of a place for a sentence
_NEAREST = 128  # tokens from what is read to its answer; each distance is twice the one before
_LENGTH = 8192  # tokens of a sequence at most, where no --context is longer
_TOKENS = 16384  # to read at least, in as many sequences
_FEWEST = 4  # sequences in which something is asked
_REPEATS = 2  # answers of each kind in a sequence, where there is room
_CHUNK = 512  # tokens that are read at a time
_WORDS = (
    *("river", "stone", "glass", "apple", "tiger", "paper", "ocean", "garden", "silver", "winter", "candle", "bridge"),
    *("forest", "window", "bottle", "castle", "button", "carpet", "dragon", "engine", "feather", "hammer", "island", "jacket"),
    *("kitchen", "ladder", "market", "needle", "orange", "pencil", "rabbit", "saddle"),
)

Cell = tuple[str, int | None]  # a task, and a distance; of text, a position; None where things lie anywhere


class Reading(NamedTuple):
    """A sequence to read, and what to score in it.

    Attributes:
        ids: Its tokens, `[T]`.
        answers: What is scored: tokens that belong together, by their cell and positions `[n]`, from 1 on.
    """

    ids: torch.Tensor
    answers: list[tuple[Cell, torch.Tensor]]


class Question(NamedTuple):
    """Sentences to insert into a text, and the question that follows later.

    Attributes:
        cell: The task, and the distance from the first token of the sentence to that of the question.
        parts: Token ids of each sentence.
        asked: Token ids of the question and its answer.
        scored: Indices of the answer's tokens in `asked`.
    """

    cell: Cell
    parts: list[torch.Tensor]
    asked: torch.Tensor
    scored: torch.Tensor


class Found(NamedTuple):
    """Scores of the answers of a cell, in order.

    Attributes:
        nats: Mean loss of each answer's tokens, `[answers]`, fp64.
        exact: Whether each token of an answer is the likeliest, `[answers]`.
    """

    nats: torch.Tensor
    exact: torch.Tensor


def probes_for(settings: EvaluationSettings, sources: Sequence[Source], tokens: Tokens) -> list[Reading] | None:
    """The probes; None if they are not wanted, or if positions or the text are too short for the least distance."""
    limits = [limit for limit in (position_limit(sources), *map(_same_frequencies, sources)) if limit]
    wanted = max(_LENGTH, *settings.contexts, 0)
    positions = min([wanted, *limits])
    if not settings.probes or min(positions, len(tokens.ids)) < _NEAREST + RUN + 1:
        return None
    tokenizer = sources[0].tokenizer()
    return probes_on(tokens.ids, positions, lambda text: encoded(text, tokenizer)[0], tokens.bos)


def probes_on(
    ids: torch.Tensor, positions: int, encode: Callable[[str], torch.Tensor], bos: int | None = None
) -> list[Reading]:
    """The probes on a text's `ids [n]` for models of so many positions. The same arguments give the same tokens.

    Every sequence begins with the tokenizer's BOS token if it has one.
    """
    opening = ids.new_tensor([] if bos is None else [bos])
    length = min(positions - len(opening), len(ids))
    asking = min(length, max(length, _LENGTH) // 2 + 2 * RUN)  # distances up to half of the positions
    count, random = max(_FEWEST, _TOKENS // asking), _Random(ids, encode)
    starts = (number * (len(ids) - asking) // count for number in range(count))
    parts = [torch.cat((opening, ids[start : start + asking])) for start in starts]
    alone = _text(torch.cat((opening, ids[:length])))
    return [alone, *(_with_questions(part, len(opening), random) for part in parts)]


def probed(readings: Sequence[Reading], model: Any, name: str, progress: Progress) -> dict[Cell, Found]:
    """Score a model's answers.

    Args:
        readings: The probes.
        model: The loaded model.
        name: Its name, for progress.
        progress: Called with the number of sequences that have been read.

    Raises:
        Failure: Logits are not finite, or memory does not suffice.
    """
    nats_of, exact_of = defaultdict[Cell, list[float]](list), defaultdict[Cell, list[bool]](list)
    room = memory_for("the probes", "free some, or give --device cpu; `convert eval` has --no-probes")
    with torch.inference_mode(), room, stage(progress, f"probe {name}", len(readings), "sequence") as done:
        for reading in readings:
            scored = torch.zeros(len(reading.ids), dtype=torch.bool)
            scored[torch.cat([positions for _, positions in reading.answers])] = True
            nats, likeliest = _read(model, reading.ids, scored)
            for cell, positions in reading.answers:
                nats_of[cell].append(float(nats[positions].mean()))
                exact_of[cell].append(bool(likeliest[positions].all()))
            done(1)
    return {
        cell: Found(torch.tensor(nats, dtype=torch.float64), torch.tensor(exact_of[cell])) for cell, nats in nats_of.items()
    }


def _same_frequencies(source: Source) -> int | None:
    """The positions within which LongRoPE keeps its frequencies, where `generate` goes on with a cache; None for all."""
    rope = getattr(source.decoder, "rope_parameters", None) or {}
    return rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None


def figures(found: dict[Cell, Found], source: dict[Cell, Found]) -> list[dict[str, Any]]:
    """A model's part of a report: for each cell its mean loss over the source's, with the standard error of that mean.

    Of the source itself both are of the loss. Exactness is a share of the answers; text has none.
    """
    entries = []
    for (task, at), (nats, exact) in found.items():
        over = nats if found is source else nats - source[task, at].nats
        error = float(over.std() / math.sqrt(len(over))) if len(over) > 1 else None
        entry = {"task": task, "at": at, "answers": len(nats), "nats": float(over.mean()), "standard_error": error}
        entries.append(entry | ({} if task == "text" else {"exact": float(exact.double().mean())}))
    return entries


def _text(ids: torch.Tensor) -> Reading:
    """A text alone, whose answers are pieces of it; in cells by position: below 128, from there on, from 256 on, …"""
    answers = list[tuple[Cell, torch.Tensor]]()
    for positions in torch.arange(1, len(ids)).split(RUN):
        power = int(positions[0]) // _NEAREST
        answers.append((("text", _NEAREST << (power.bit_length() - 1) if power else 0), positions))
    return Reading(ids, answers)


def _with_questions(ids: torch.Tensor, opening: int, random: _Random) -> Reading:
    """A text with what is asked in it, at random places; what finds none is left out."""
    ids, free = ids.clone(), set(range((len(ids) - opening) // RUN))
    answers = []
    for question in _questions(len(free), random):
        if not len(question.scored) or (places := _places(question, free, random)) is None:
            continue
        for place, part in zip(places, [*question.parts, question.asked], strict=True):
            start = opening + place * RUN
            ids[start : start + len(part)] = part
            free -= _taken(place, part)
        answers.append((question.cell, opening + places[-1] * RUN + question.scored))
    return Reading(ids, sorted(answers, key=lambda answer: (answer[0][0], answer[0][1] or 0)))


def _questions(places: int, random: _Random) -> Iterator[Question]:
    """Those for a sequence of so many places, first one of each kind; the farthest first, for which there is least room."""
    powers = range((places * RUN // _NEAREST).bit_length())
    distances = [distance for power in powers if (distance := _NEAREST << power) <= (places - 1) * RUN]
    words = random.words()
    for repeat in range(_REPEATS):
        for distance in reversed(distances):
            run = random.run()
            yield Question(("copy", distance), [run], run, torch.arange(1, RUN))
            yield random.pair(next(words), distance)
        if not repeat:
            yield from random.several(words)


def _places(question: Question, free: set[int], random: _Random) -> list[int] | None:
    """Free places for the parts and for what asks, in order; None if there are none."""
    distance, parts = question.cell[1], question.parts

    def fits(start: int, ids: torch.Tensor) -> bool:
        return _taken(start, ids) <= free

    if distance is not None:
        apart = distance // RUN
        starts = [start for start in sorted(free) if fits(start, parts[0]) and fits(start + apart, question.asked)]
        return [start, start + apart] if (start := random.choice(starts)) is not None else None
    last = max((start for start in free if fits(start, question.asked)), default=0)
    starts = [start for start in sorted(free) if start < last and all(fits(start, part) for part in parts)]
    if len(starts) < 2 * len(parts):
        return None
    return [starts[len(starts) * number // len(parts)] for number in range(len(parts))] + [last]


def _taken(start: int, ids: torch.Tensor) -> set[int]:
    return set(range(start, start + -(-len(ids) // RUN)))


class _Random:
    """Draws what is put into texts.

    Args:
        ids: Of the text, `[n]`.
        encode: Makes token ids of a sentence.
    """

    def __init__(self, ids: torch.Tensor, encode: Callable[[str], torch.Tensor]) -> None:
        self._generator, self._counts, self._encode = torch.Generator().manual_seed(0), torch.bincount(ids).double(), encode

    def choice(self, of: Sequence[int]) -> int | None:
        """One of several numbers; None of none."""
        return of[int(torch.randint(len(of), (), generator=self._generator))] if of else None

    def words(self) -> Iterator[str]:
        """All words in random order, again and again."""
        while True:
            yield from (_WORDS[i] for i in torch.randperm(len(_WORDS), generator=self._generator).tolist())

    def run(self) -> torch.Tensor:
        """Token ids `[RUN]`."""
        return self._counts.multinomial(RUN, replacement=True, generator=self._generator)

    def pair(self, word: str, distance: int) -> Question:
        """A key with its value, asked so far behind it."""
        asked, scored = self._sentence(f"\nThe code of {word} is", self._code(), ".\n")
        return Question(("key–value", distance), [asked], asked, scored)

    def several(self, words: Iterator[str]) -> Iterator[Question]:
        """The tasks of which the parts lie anywhere."""
        names, codes = [next(words) for _ in range(4)], [self._code() for _ in range(4)]
        parts = [self._encode(f"\nThe code of {name} is{code}.\n") for name, code in zip(names, codes, strict=True)]
        a, b, c, d = names
        pieces = [f"\nThe codes of {a}, {b}, {c} and {d} are", *(piece for code in codes for piece in (code, ","))]
        yield Question(("four codes", None), parts, *self._sentence(*pieces))
        a, b, c, value = next(words), next(words), next(words), self._code()
        parts = [self._encode(f"\nVAR {a} ={value}\n")]
        parts += [self._encode(f"\nVAR {name} = VAR {before}\n") for before, name in ((a, b), (b, c))]
        yield Question(("variables", None), parts, *self._sentence(f"\nThe value of VAR {c} is", value, ".\n"))

    def _code(self) -> str:
        """Five digits behind a blank."""
        return f" {int(torch.randint(10_000, 100_000, (), generator=self._generator))}"

    def _sentence(self, *pieces: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The token ids of a sentence, and the places of those that begin in its second, fourth, … piece."""
        whole, ends = self._encode("".join(pieces)), []
        for text in accumulate(pieces):
            part = self._encode(text)[: len(whole)]
            ends.append(int((part == whole[: len(part)]).long().cumprod(0).sum()))  # the last tokens may join with what follows
        return whole, torch.cat([torch.arange(*span) for span in zip(ends[::2], ends[1::2], strict=False)])


def _read(model: Any, ids: torch.Tensor, scored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss `[T]`, fp64, of tokens `ids [T]` where they are `scored [T]`, and whether they are the likeliest ones."""
    device, cache = input_device(model), None
    nats, likeliest = torch.zeros(len(ids), dtype=torch.float64), torch.zeros_like(scored)
    for part in torch.arange(len(ids) - 1).split(_CHUNK):
        asked = part[scored[part + 1]]
        held: dict[str, Any] = {} if cache is None else {CACHE: cache}
        indices = asked - part[0]
        wanted = logits_kept(model, indices if len(asked) else 1)
        output = model(input_ids=ids[None, part].to(device), use_cache=True, **held, **wanted)
        cache, logits, targets = output[CACHE], output.logits[0], ids[asked + 1]
        logits = finite(logits if len(logits) == len(asked) else logits[indices], model).float()
        nats[asked + 1] = cross_entropy(logits, targets.to(logits.device), reduction="none").double().cpu()
        likeliest[asked + 1] = logits.argmax(-1).cpu() == targets
    return nats, likeliest
