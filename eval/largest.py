"""The largest batch over which a model runs a decode step, found by running it: it fills the memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eval.device import free_memory
from eval.entrant import Entrant, loaded
from eval.workload import Workload, fits

MOST_SEQUENCES = 4096  # where the search ends
Largest = tuple[int | None, str | None]  # a batch, and why there is none or no more


def search(entrant: Entrant, contexts: Sequence[int], device: torch.device) -> dict[int, Largest]:
    """The largest batch at each context. Everything else has been measured by now: no error may lose it."""
    sizes: dict[int, Largest] = {}
    failed = None
    try:
        with loaded([entrant], device) as models:
            for context in contexts:
                sizes[context] = _largest(entrant, models[0], context, device)
    except Exception as error:  # a GPU that an earlier search has upset can neither load nor free memory
        failed = _failed(entrant, error)
    return {context: sizes.get(context, (None, failed)) for context in contexts}


@torch.no_grad()
def _largest(entrant: Entrant, model: Any, context: int, device: torch.device) -> Largest:
    try:
        size = largest_batch(model, context, free_memory(device), entrant.cache_bytes(1, context))
    except Exception as error:  # kernels, their compilers and the driver have limits and classes of their own
        return None, _failed(entrant, error)
    return size, f"the search ends at {MOST_SEQUENCES}" if size == MOST_SEQUENCES else None


def _failed(entrant: Entrant, error: Exception) -> str:
    return f"the search failed for {entrant.source.name}: {' '.join(str(error).split())[:200] or type(error).__name__}"


def largest_batch(model: Any, context: int, room: int, bytes_per_sequence: int) -> int:
    """The most sequences of `context` tokens over which `model` runs a decode step, found by running it; 0 if none.

    The cache is written by steps alone: a prefill can go sequence by sequence.

    Args:
        model: On a GPU, with nothing else there that could be removed.
        context: Tokens of each sequence, the new one among them.
        room: Bytes that are free.
        bytes_per_sequence: Of the cache of one sequence.
    """

    def runs(batch: int) -> bool:
        def twice() -> None:
            workload = Workload(model, batch, context)
            for _ in range(2):  # the first allocates
                workload.to_last()
                workload.step()

        return fits(twice)

    return most(runs, room // bytes_per_sequence)


def most(runs: Callable[[int], bool], guess: int, limit: int = MOST_SEQUENCES) -> int:
    """The largest number up to `limit` for which `runs` is true, as it is for all below; 0 if there is none.

    Looks near `guess` first, in strides of a tenth, and halves the last one down to one.
    """
    low, high = 0, limit + 1  # runs, does not
    probe = min(max(guess, 1), limit)
    while high - low > 1:
        if runs(probe):
            low = probe
        else:
            high = probe
        if high > limit:
            probe = min(limit, low + low // 10 + 1)
        elif low == 0:
            probe = high - high // 10 - 1
        else:
            probe = (low + high) // 2
    return low
