"""Finds the largest batch for which a model can run a decode step, by trying; this fills the memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attention.errors import one_line
from eval.machine.device import free_memory
from eval.speed.model_run import ModelRun, loaded
from eval.speed.workload import Workload, fits

MOST_SEQUENCES = 4096  # where the search ends
Largest = tuple[int | None, str | None]  # a batch, and why there is none or no larger one


def search(run: ModelRun, contexts: Sequence[int], device: torch.device) -> dict[int, Largest]:
    """The largest batch at each context. No error may escape, so that the earlier measurements are kept."""
    sizes: dict[int, Largest] = {}
    failed = None
    try:
        with loaded([run], device) as models:
            for context in contexts:
                sizes[context] = _largest(run, models[0], context, device)
    except Exception as error:  # after a failed search a GPU may neither load nor free memory
        failed = _failed(run, error)
    return {context: sizes.get(context, (None, failed)) for context in contexts}


@torch.no_grad()
def _largest(run: ModelRun, model: Any, context: int, device: torch.device) -> Largest:
    try:
        size = largest_batch(model, context, free_memory(device), run.cache_bytes(1, context))
    except Exception as error:  # kernels, their compilers and the driver have their own limits and exception classes
        return None, _failed(run, error)
    return size, f"the search ends at {MOST_SEQUENCES}" if size == MOST_SEQUENCES else None


def _failed(run: ModelRun, error: Exception) -> str:
    return f"the search failed for {run.source.name}: {one_line(error) or type(error).__name__}"


def largest_batch(model: Any, context: int, room: int, bytes_per_sequence: int) -> int:
    """The most sequences of `context` tokens for which `model` can run a decode step, found by trying; 0 if none.

    Only decode steps write the cache, since a prefill can go sequence by sequence.

    Args:
        model: A model on a GPU that holds nothing else that could be freed.
        context: Tokens per sequence, including the new one.
        room: Free bytes.
        bytes_per_sequence: Bytes of the cache of one sequence.
    """

    def runs(batch: int) -> bool:
        def twice() -> None:
            workload = Workload(model, batch, context)
            for _ in range(2):  # the first one allocates
                workload.to_last()
                workload.step()

        return fits(twice)

    return most(runs, room // bytes_per_sequence)


def most(runs: Callable[[int], bool], guess: int, limit: int = MOST_SEQUENCES) -> int:
    """The largest number up to `limit` for which `runs` is true; 0 if there is none. `runs` must be true below it.

    Searches near `guess` first, in strides of a tenth, then halves the last stride down to one.
    """
    low, high = 0, limit + 1  # the largest that runs, the smallest that does not
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
