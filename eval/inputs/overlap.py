"""Measures the overlap of texts: perplexity on the text that a model was calibrated on is too low."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from eval.inputs.text import Tokens

_log = logging.getLogger("kvfold")
WARN_ABOVE = 0.01  # texts of one language share some runs
_RUN = 32  # tokens; different texts hardly share a run of this length


def overlap(evaluated: torch.Tensor, seen: torch.Tensor) -> float:
    """The share of `evaluated` ids `[n]`, cut into runs of 32 tokens, that occurs anywhere in `seen` ids `[m]`.

    A text of fewer tokens is one run. Memory grows with n only.
    """
    run = min(_RUN, len(evaluated))
    runs = list(_runs(evaluated, run, run))
    wanted = set(runs)
    found = {part for part in _runs(seen, run, 1) if part in wanted}
    return sum(part in found for part in runs) / len(runs)


def warn_of_overlap(evaluated: Tokens, texts: Iterable[Tokens], what: str) -> None:
    """Warn, before the work, of text that is to be evaluated on and is also to be learned from.

    Args:
        evaluated: What perplexity will be measured on.
        texts: What is learned from.
        what: What the texts are for: "calibration" or "training".
    """
    for seen in texts:
        if (share := overlap(evaluated.ids, seen.ids)) > WARN_ABOVE:
            _log.warning(
                "%s shares %.0f%% of its runs with the %s text %s: its perplexity will be flattered",
                evaluated.name, 100 * share, what, seen.name,
            )  # fmt: skip


def _runs(ids: torch.Tensor, length: int, stride: int) -> Iterator[bytes]:
    raw, size = ids.numpy().astype("<i4").tobytes(), 4
    for start in range(0, len(ids) - length + 1, stride):
        yield raw[start * size : (start + length) * size]
