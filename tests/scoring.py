"""Scores of models that are in memory already."""

from collections.abc import Callable, Sequence
from typing import Any

from eval.quality.lockstep import score_group
from eval.quality.perplexity import Batch, Score, batches


def compare(
    source: Any, models: Sequence[Any], blocks: list[Batch], progress: Callable[[int], object] = lambda tokens: None
) -> list[Score]:
    """The source's score on blocks, then each model's against it."""
    scores = [Score() for _ in (source, *models)]
    others = [(model, [score]) for model, score in zip(models, scores[1:], strict=True)]
    score_group([list(batches(blocks, source.config.vocab_size))], source, scores[:1], others, progress)
    return scores
