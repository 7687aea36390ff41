"""Scores converted models beside their source, which runs once, however many they are.

Memory holds the source and one other model, or several if they are small. Models that are loaded later are compared with the
source's logits on disk. If all of them would take more room than allowed, the text is cut into portions: each is scored with
all models before the next one begins, so every model is loaded once per portion.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention.errors import Failure
from eval.inputs.source import Source
from eval.machine.device import memory_for
from eval.quality.perplexity import Batch, Score, add, logits_of
from eval.terminal.progress import Progress, stage

_log = logging.getLogger("kvfold")
_SMALL = 250 * 10**6  # bytes of weights that fit beside the source on any machine
_MOST_KEPT = 32 * 10**9  # bytes of logits on disk, and at most half of what is free there


class Job(NamedTuple):
    """A batch to score, with the score of each model that it adds to, the source's first."""

    batch: Batch
    scores: Sequence[Score]


class KeptLogits:
    """Logits of the source, a file for each batch of a portion.

    Args:
        directory: An empty directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, number: int, logits: torch.Tensor) -> None:
        """Keep the logits of the batch with this number.

        Raises:
            Failure: They cannot be written.
        """
        try:
            torch.save(logits.clone(), self._file(number))  # of a view, torch would write all that it is a view of
        except (OSError, RuntimeError) as error:  # torch raises the latter where a disk is full
            raise Failure(
                f"cannot keep the source's logits in {self._directory}: {str(error).splitlines()[0][:200]}",
                hint="free some space, or name another directory in TMPDIR; fewer --max-tokens take less",
            ) from error

    def logits(self, number: int) -> torch.Tensor:
        found: torch.Tensor = torch.load(self._file(number), map_location="cpu", weights_only=True)
        return found

    def _file(self, number: int) -> Path:
        return self._directory / f"{number}.pt"


def room_for_logits() -> int:
    """Bytes of logits that may be kept on disk."""
    return min(_MOST_KEPT, shutil.disk_usage(tempfile.gettempdir()).free // 2)


def portions(jobs: Sequence[Job], vocabulary: int, room: int) -> Iterator[Sequence[Job]]:
    """Consecutive jobs whose logits fit into `room` bytes, even in fp32; at least one job each."""
    start, size = 0, 0
    for end, job in enumerate(jobs):
        more = len(job.batch.targets) * vocabulary * 4
        if end > start and size + more > room:
            yield jobs[start:end]
            start, size = end, 0
        size += more
    yield jobs[start:]


def score_group(
    jobs: Sequence[Job],
    source: Any | None,
    models: Sequence[tuple[int, Any]],
    kept: KeptLogits | None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> None:
    """Score some models on a portion of the jobs.

    Args:
        jobs: Those of the portion.
        source: The source, which is scored, too; None if its logits are already kept.
        models: The other models, each with the index of its score.
        kept: Where the source's logits are, or will be; None if no other models need them.
        progress: Called with the number of tokens newly scored.

    Raises:
        Failure: A model's logits are not finite, or the source's cannot be kept.
    """
    with torch.inference_mode():
        for number, (batch, scores) in enumerate(jobs):
            if source is not None:
                expected = logits_of(source, batch)
                add(scores[0], batch, expected)
                if kept is not None:
                    kept.keep(number, expected)
            else:
                assert kept is not None, "a later group reads what the first one kept"
                expected = kept.logits(number)
            for index, model in models:  # hold one model's logits at a time
                add(scores[index], batch, logits_of(model, batch), expected)
            progress(len(batch.targets))


def score_all(
    jobs: Sequence[Job],
    sources: Sequence[Source],
    opened: Callable[[int], AbstractContextManager[Any]],
    visit: Callable[[int, Any], object],
    progress: Progress,
) -> None:
    """Score every model on every job; the source runs once.

    Args:
        jobs: What to score, each with one score per model.
        sources: The models; the source comes first.
        opened: Loads a model by its index; the end of the block frees it.
        visit: Called once with each model and its index, while it is loaded.
        progress: Called with the number of scored tokens.
    """
    groups = _groups(sources[1:])
    vocabulary = sources[0].vocabulary
    alone = len(groups) == 1  # nothing need be kept on disk
    parts = [jobs] if alone else list(portions(jobs, vocabulary, room_for_logits()))
    if len(parts) > 1:
        _log.warning(
            "%s has room for the source's logits on a part of the text only: every model is loaded %d times "
            "(TMPDIR names another directory)", tempfile.gettempdir(), len(parts),
        )  # fmt: skip
    for turn, portion in enumerate(parts):
        with tempfile.TemporaryDirectory(prefix="kvfold-logits-") as directory:
            kept = None if alone else KeptLogits(Path(directory))
            for order, group in enumerate(groups):
                with ExitStack() as stack:
                    source = stack.enter_context(opened(0)) if order == 0 else None
                    models = [(index, stack.enter_context(opened(index))) for index in group]
                    name = ", ".join(sources[index].name for index in group or [0])
                    name += f", part {turn + 1} of {len(parts)}" if len(parts) > 1 else ""
                    total = sum(len(job.batch.targets) for job in portion)
                    room = memory_for("the evaluation", "free some, or give --device cpu, or a shorter --context")
                    with stage(progress, f"evaluate {name}", total, "token") as done, room:
                        score_group(portion, source, models, kept, done)
                    if turn == 0:
                        _visit([(0, source), *models] if source is not None else models, visit)
                    del source, models  # or they would stay in memory while the next ones are loaded


def _visit(models: Sequence[tuple[int, Any]], visit: Callable[[int, Any], object]) -> None:
    for index, model in models:
        visit(index, model)


def _groups(others: Sequence[Source]) -> list[list[int]]:
    """The indices of the models in order, grouped: as many as have weight files of `_SMALL` bytes together, or a single one."""
    groups: list[list[int]] = []
    room = 0
    for index, other in enumerate(others, 1):
        size = sum(file.stat().st_size for file in (*other.files.glob("*.safetensors"), *other.files.glob("*.bin")))
        if not groups or size > room:
            groups.append([])
            room = _SMALL
        groups[-1].append(index)
        room -= size
    return groups or [[]]
