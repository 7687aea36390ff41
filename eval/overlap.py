"""Whether a text was seen before: a perplexity on the text that a model was calibrated on flatters it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_RUN = 32  # tokens that texts of one language do not share by chance


def shared_share(evaluated: torch.Tensor, seen: torch.Tensor) -> float:
    """The share of `evaluated` ids `[n]`, in runs of 32 tokens, that occurs anywhere in `seen` ids `[m]`.

    A text of fewer tokens is one run.
    """
    run = min(_RUN, len(evaluated))
    known = set(_runs(seen, run, 1))
    runs = _runs(evaluated, run, run)
    return sum(part in known for part in runs) / len(runs)


def _runs(ids: torch.Tensor, length: int, stride: int) -> list[bytes]:
    raw, size = ids.numpy().astype("<i4").tobytes(), 4
    starts = range(0, len(ids) - length + 1, stride)
    return [raw[start * size : (start + length) * size] for start in starts]
