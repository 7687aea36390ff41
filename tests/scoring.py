"""Scores of models that are in memory already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.quality.lockstep import Job, score_group
from eval.quality.perplexity import Score, batches
from eval.quality.protocol import Block


def compare(
    source: Any, models: Sequence[Any], blocks: list[Block], progress: Callable[[int], object] = lambda tokens: None
) -> list[Score]:
    """The source's score on blocks, then each model's against it."""
    scores = [Score() for _ in (source, *models)]
    jobs = [Job(batch) for batch in batches(blocks, source.config.vocab_size)]
    others = [(model, [score]) for model, score in zip(models, scores[1:], strict=True)]
    score_group(jobs, source, scores[:1], others, progress)
    return scores
