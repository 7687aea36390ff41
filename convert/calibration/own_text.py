"""Text that a model writes itself, to calibrate on: rows of tokens that are drawn from it, each as long as a block.

It needs no data set, and it is of every kind that the model knows. In post-training quantisation it closes most of the gap
between random tokens and real text (Williams et al., "Self-calibration for Language Model Quantization and Pruning", 2024).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attention.errors import Failure
from attention.patch import prepared
from attention.spec import AttentionSpec
from attention.versions import CACHE
from eval.inputs.loading import load
from eval.inputs.sealed import Shelf, read_object
from eval.inputs.text import bos_before_texts
from eval.machine.device import input_device, memory_for, rough, whole_memory
from eval.quality.opened import Opening
from eval.quality.perplexity import finite
from eval.terminal.progress import Progress, stage

if TYPE_CHECKING:
    from eval.inputs.source import Source

_log = logging.getLogger("kvfold")
ROWS = 64  # at once
_CACHES = 0.25  # share of a device's memory that the cache of such rows may take
_PILOT = 64  # rows, and tokens of each, from which first tokens are drawn, where texts begin with any
_OTHERWISE = "calibrate on a text: --text FILE; or on none: --no-text"
_LEAST_WORDS = 4.0  # different tokens, as the exponential of their entropy; fewer say nothing
_A_DAY = "{%- macro strftime_now(form) -%}01 Jan 2026{%- endmacro -%}"  # instead of today, which some templates name
_LONGEST = 30  # seconds for a template, and for the import that it needs
_RENDER = """
import contextlib, json, sys
with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has it
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
from transformers.utils.chat_template_utils import render_jinja_template
print(json.dumps(render_jinja_template(**json.load(sys.stdin))[0][0]))
"""
_MARKS = "⟦1⟧", "⟦2⟧", "⟦3⟧"  # of turns, which no template holds


@dataclass(frozen=True)
class Turns:
    """The frame that a chat template puts around turns, as token ids.

    Attributes:
        opening: Before the first turn of the user.
        answer: Between a turn of the user and one of the assistant.
        reply: Between a turn of the assistant and one of the user.
    """

    opening: tuple[int, ...]
    answer: tuple[int, ...]
    reply: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> Turns | None:
        """Those of the tokenizer's template; None where it has none, or where it fails or changes what turns say."""
        if not getattr(tokenizer, "chat_template", None):
            return None
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        try:
            text, parts = _rendered(tokenizer, messages), []
            for mark in _MARKS:
                part, found, text = text.partition(mark)
                if not found:
                    raise ValueError("it changes or leaves out what turns say")
                parts.append(tuple(tokenizer(part, add_special_tokens=False)["input_ids"]))
        except Exception as error:  # a template is a program that anyone may have written
            reason = " ".join(str(error).split())[:120]
            _log.warning("the chat template cannot be used, so the model writes no conversations: %s", reason)
            return None
        return cls(*parts)


def _rendered(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """Messages in the tokenizer's chat template. A process of its own bounds their time and memory: jinja does not.

    Raises:
        RuntimeError: The template fails, or takes more.
    """
    template = _A_DAY + tokenizer.get_chat_template()
    given = {"conversations": [messages], "chat_template": template, **tokenizer.special_tokens_map}
    command, paths = [sys.executable, "-P", "-c", _RENDER], os.pathsep.join(filter(None, sys.path))
    how: dict[str, Any] = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": paths}}
    try:
        done = subprocess.run(command, input=json.dumps(given), timeout=_LONGEST, check=False, **how)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it takes more than {_LONGEST} seconds") from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"it ended with {done.returncode}")
    return str(json.loads(done.stdout))


@dataclass(frozen=True)
class Voice:
    """How the texts of a model begin and end.

    Attributes:
        start: The token that a text begins with; None if it begins with any.
        ends: Tokens that end a text or a turn.
        turns: Of conversations; None if the model has no usable chat template.
        known: Ids below this are those of its tokenizer.
    """

    start: int | None
    ends: frozenset[int]
    turns: Turns | None
    known: int

    @classmethod
    def of(cls, source: Source) -> Voice:
        """That of a checkpoint: from its tokenizer, its config and its generation_config.json.

        Raises:
            Failure: The tokenizer cannot be loaded.
        """
        tokenizer = source.tokenizer() if source.tokenizer_files else None
        generation = read_object(source.files / "generation_config.json") or {}

        def said(name: str) -> list[int]:
            found = [getattr(tokenizer, name, None), getattr(source.decoder, name, None), generation.get(name)]
            flat = [token for given in found for token in (given if isinstance(given, list | tuple) else [given])]
            return [token for token in flat if isinstance(token, int) and 0 <= token < source.vocabulary]

        known = source.vocabulary if tokenizer is None else min(len(tokenizer), source.vocabulary)
        ends = frozenset(said("eos_token_id"))
        opening = said("bos_token_id")  # some chat models know a BOS that only opens turns
        begin = opening if tokenizer is None else [bos_before_texts(tokenizer)]
        start = next((token for token in opening if token in begin or token in ends), None)
        turns = Turns.of(tokenizer)
        if turns and max((*turns.opening, *turns.answer, *turns.reply), default=0) >= source.vocabulary:
            _log.warning("the chat template has tokens that the model does not know, so it writes no conversations")
            turns = None
        return cls(start, ends, turns, known)


@dataclass
class _Row:
    """One row while it grows.

    Attributes:
        forced: Its next tokens, whatever the model says.
        then: What follows each end of a text or a turn, in turns.
        ends: Tokens that end a text or a turn.
        drawn: The token that is meant where one is None, by a chance.
    """

    forced: deque[int | None]
    then: deque[Sequence[int | None]]
    ends: frozenset[int]
    drawn: Callable[[float], int]

    def next(self, sampled: int, chance: float) -> int:
        """The next token, where the model would say `sampled`."""
        if self.forced:
            forced = self.forced.popleft()
            return self.drawn(chance) if forced is None else forced
        if sampled in self.ends:
            self.forced.extend(self.then[0])
            self.then.rotate(-1)
            if self.forced and self.forced[0] == sampled:  # a template writes the end of a turn, too
                self.forced.popleft()
        return sampled


def own_text(
    source: Source,
    rows: int,
    length: int,
    seed: int,
    device: torch.device,
    directory: Path,
    progress: Progress,
    otherwise: str = _OTHERWISE,
    opening: Opening = load,
) -> torch.Tensor:
    """A model's own text: `[rows, length]`, int64.

    Every token is drawn by the probability that the model gives it: with colder and with hotter samples, conversions lost more.
    Every other row is a conversation, where the model has a chat template. A text that ends is followed by another one.

    Args:
        source: The model.
        rows: How many.
        length: Tokens of each.
        seed: The same seed gives the same tokens on one machine.
        device: Where it is written.
        directory: Keeps finished batches, for a run that resumes and for other conversions of this model.
        progress: Called with the rows written.
        otherwise: What to do where it writes nothing of use.
        opening: Loads the model.

    Raises:
        Failure: The model cannot be loaded, its logits are not finite, memory does not suffice, or it keeps writing the same
            few tokens.
    """
    kept = Shelf(directory, f"own-text-{seed}-{rows}x{length}")
    cached = AttentionSpec.from_config(source.config).cache_bytes("float32", length)
    size = max(1, min(ROWS, int(_CACHES * whole_memory(device)) // cached))
    chances = torch.rand(rows, length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    parts = []
    with contextlib.ExitStack() as stack:
        done = stack.enter_context(stage(progress, "write text", rows, "row"))
        stack.enter_context(memory_for("the text that the model writes", "give --text FILE, or --device cpu"))
        writer, dtype = None, str(rough(device)).removeprefix("torch.")
        for start in range(0, rows, size):
            part = chances[start : start + size]
            if not kept.has(start) or len(kept.get(start)[0]["ids"]) != len(part):  # of a machine with another memory
                if writer is None:
                    model = stack.enter_context(opening(source, dtype, str(device)))
                    stack.enter_context(torch.inference_mode())
                    writer = _Writer(prepared(model), Voice.of(source), length)
                kept.put(start, {"ids": writer.written(start, part)}, {})
            parts.append(kept.get(start)[0]["ids"])
            done(len(part))
    ids = torch.cat(parts)
    _require_words(source, ids, otherwise)
    return ids


class _Writer:
    """Writes batches of rows of at most `length` tokens by a causal LM of transformers; `voice` says how they begin and end."""

    def __init__(self, model: Any, voice: Voice, length: int) -> None:
        self._model, self._voice = model, voice
        self._starts = None if voice.start is not None else self._pilot(length)

    def written(self, first: int, chances: torch.Tensor) -> torch.Tensor:
        """Rows of tokens, `[n, length]`.

        Args:
            first: The number of the first row.
            chances: `[n, length]`, fp64, even between 0 and 1: a row's own decide its tokens.
        """
        return self._sampled([self._row(first + i) for i in range(len(chances))], chances)

    def _row(self, number: int) -> _Row:
        voice = self._voice
        turns = voice.turns if number % 2 else None
        if turns is None:
            return _Row(deque([voice.start]), deque([(voice.start,)]), voice.ends, self._drawn)
        return _Row(deque(turns.opening or [voice.start]), deque((turns.answer, turns.reply)), voice.ends, self._drawn)

    def _drawn(self, chance: float) -> int:
        """A first token by its frequency in what the model writes."""
        assert self._starts is not None, "its texts begin with one token"
        return int(self._starts[int(chance * len(self._starts))])

    def _pilot(self, length: int) -> torch.Tensor:
        """Tokens by their frequency in what the model writes after tokens that are all as likely, `[n]`."""
        length = min(_PILOT, length)
        chances = torch.rand(_PILOT, length, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        rows = [_Row(deque([None]), deque(), frozenset(), lambda chance: int(chance * self._voice.known)) for _ in chances]
        return self._sampled(rows, chances)[:, length // 2 :].flatten()

    def _sampled(self, rows: list[_Row], chances: torch.Tensor) -> torch.Tensor:
        device, cache, ids = input_device(self._model), None, torch.empty(chances.shape, dtype=torch.int64)
        ids[:, 0] = _next(rows, [-1] * len(rows), chances[:, 0])
        for position in range(1, chances.shape[1]):
            found = self._model(input_ids=ids[:, position - 1 : position].to(device), use_cache=True, **{CACHE: cache})
            cache, logits = found[CACHE], finite(found.logits[:, -1, : self._voice.known], self._model)
            reached = logits.float().cpu().softmax(-1).double().cumsum(-1)
            drawn = torch.searchsorted(reached, chances[:, position, None] * reached[:, -1:]).flatten()
            ids[:, position] = _next(rows, drawn.tolist(), chances[:, position])
        return ids


def _next(rows: Sequence[_Row], sampled: Sequence[int], chances: torch.Tensor) -> torch.Tensor:
    """The next token of each row `[n]`, where the model would say `sampled`."""
    each = zip(rows, sampled, chances.tolist(), strict=True)
    return torch.tensor([row.next(token, chance) for row, token, chance in each])


def _require_words(source: Source, ids: torch.Tensor, otherwise: str = _OTHERWISE) -> None:
    """Refuse a text of a few tokens again and again: nothing can be calibrated on it."""
    shares = torch.bincount(ids.flatten()).double() / ids.numel()
    words = float(torch.special.entr(shares).sum().exp())
    if words < _LEAST_WORDS:
        raise Failure(
            f"{source.reference} writes the same few tokens again and again: {words:.1f} different ones, by their entropy",
            hint=otherwise,
        )
