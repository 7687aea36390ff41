"""Scores models beside their source, batch by batch, so that the logits of two models at most are in memory.

The source stays loaded. The others are loaded beside it: several together while they are small, larger ones one after another,
for each of which the source runs again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attention.encoded_forward import read_rounded, store_encoded
from attention.formats import KIVI
from attention.patch import pad_values
from attention.spec import AttentionSpec
from eval.inputs.loading import load
from eval.inputs.source import Source
from eval.machine.device import memory_for
from eval.quality.cost import cache_figures
from eval.quality.opened import Opening
from eval.quality.perplexity import Batch, Score, add, logits_of
from eval.quality.probes import Cell, Found, Probes
from eval.quality.settings import EvaluationSettings
from eval.terminal.progress import Progress, silent, stage

_SMALL = 250 * 10**6  # bytes of weights that fit beside the source on any machine


@dataclass
class Row:
    """A model over one format of its cache: a row of a report, and what is measured of it.

    Attributes:
        source: The checkpoint, labelled with the format.
        form: The format that its cache is stored in or rounded to; None for its own dtype.
        scores: One for each context.
        remarks: What to know of it, as what follows its name in a sentence.
        entry: What the report says of it before its scores: what it is, and its cache.
        found: Its scores in the probes.
    """

    source: Source
    form: str | None
    scores: list[Score]
    remarks: list[str] = field(default_factory=list)
    entry: dict[str, Any] = field(default_factory=dict)
    found: dict[Cell, Found] = field(default_factory=dict)


class Job(NamedTuple):
    """A batch to score, and the index of its context."""

    batch: Batch
    context: int = 0


@dataclass(frozen=True)
class Lockstep:
    """What is measured of models, in one order.

    Attributes:
        jobs: The batches to score.
        context: Tokens of the cache that is measured.
        settings: How to load the models.
        probes: What else to read, or None.
        progress: Called with the number of scored tokens.
        opening: Loads a model that is read as it is.
    """

    jobs: Sequence[Job]
    context: int
    settings: EvaluationSettings
    probes: Probes | None = None
    progress: Progress = silent
    opening: Opening = load

    def measure(self, rows: Sequence[Row]) -> None:
        """Fill in scores, caches and probes; the source comes first.

        Raises:
            Failure: A model cannot be loaded, its figures cannot be trusted, or memory does not suffice.
        """
        first, *others = rows
        with self._opened(first, None) as source:
            for number, group in enumerate(_groups(others)):
                self._measure_group(first, source, group, again=number > 0)

    def _measure_group(self, first: Row, source: Any, group: Sequence[Row], again: bool) -> None:
        """The same of models that are loaded together. `again`: the source, which is loaded, has been measured already."""
        with contextlib.ExitStack() as stack:
            whole = first.entry["kv_bytes_per_token"]
            models = [(row, stack.enter_context(self._opened(row, whole))) for row in group]
            name = ", ".join(row.source.name for row in group or [first])
            total = sum(len(job.batch.targets) for job in self.jobs)
            room = memory_for("the evaluation", "free some, or give --device cpu, or a shorter --context")
            with stage(self.progress, f"evaluate {name}", total, "token") as done, room:
                scored = [(model, row.scores) for row, model in models]
                score_group(self.jobs, source, None if again else first.scores, scored, done)
            if self.probes is not None:
                for row, model in models if again else [(first, source), *models]:
                    if row.form not in KIVI:  # which rounds whole texts alone
                        row.found = self.probes.measure(model, row.source.name, self.progress)

    @contextlib.contextmanager
    def _opened(self, row: Row, whole: float | None) -> Iterator[Any]:
        """The model of a row, freed when the block ends, its cache measured. `whole`: the source's KV bytes per token."""
        source, form = row.source, row.form
        opening = self.opening if form is None else load  # a cache in another format changes what others would read
        with opening(source, self.settings.dtype, self.settings.device) as model:
            pad_values(model)  # several times faster on a CPU, and changes no result
            if form is not None:
                (read_rounded if form in KIVI else store_encoded)(model, form)
            spec = AttentionSpec.from_config(source.config)
            whole = spec.bytes_per_token(source.dtype, self.context) if whole is None else whole
            row.entry |= cache_figures(model, spec, source.dtype, whole, form, self.context)
            yield model


def score_group(
    jobs: Sequence[Job],
    source: Any,
    source_scores: Sequence[Score] | None,
    others: Sequence[tuple[Any, Sequence[Score]]],
    progress: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Score some models beside their source.

    Args:
        jobs: What to score.
        source: The source, loaded.
        source_scores: Its scores, one for each context; None if it has been scored already.
        others: The other models, loaded, each with its scores.
        progress: Called with the number of tokens newly scored.

    Raises:
        Failure: A model's logits are not finite.
    """
    with torch.inference_mode():
        for batch, context in jobs:
            expected = logits_of(source, batch)
            if source_scores is not None:
                add(source_scores[context], batch, expected)
            for model, scores in others:  # hold one model's logits at a time
                add(scores[context], batch, logits_of(model, batch), expected)
            progress(len(batch.targets))


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows in order, as many together as have weight files of `_SMALL` bytes, or a single one; one empty group of none."""
    group, room = list[Row](), _SMALL
    for row in rows:
        files = row.source.files
        size = sum(file.stat().st_size for file in (*files.glob("*.safetensors"), *files.glob("*.bin")))
        if group and size > room:
            yield group
            group, room = [], _SMALL
        group.append(row)
        room -= size
    yield group
