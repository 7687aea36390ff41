"""What benchmarks of decoding share: works that take turns, caches that are full, and what is said of the machine."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from eval.speed.workload import Workload

_WARM_UP = 3  # turns


def in_turns(works: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median of what each work returns, such as the milliseconds it took; who is first changes from turn to turn."""
    found: list[list[float]] = [[] for _ in works]
    for turn in range(_WARM_UP + rounds):
        for index in range(len(works))[:: -1 if turn % 2 else 1]:
            taken = works[index]()
            if turn >= _WARM_UP:
                found[index].append(taken)
    return [statistics.median(each) for each in found]


def milliseconds(work: Callable[[], Any]) -> float:
    """What `work` takes."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


@torch.no_grad()
def full(model: Any, batch: int, cached: int) -> Workload:
    """Decode steps over a static cache of random numbers, `cached` tokens per sequence."""
    workload = Workload(model, batch, cached)
    workload.step()  # allocates the cache
    for layer in workload.cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return workload


def machine() -> str:
    """What times depend on besides the work."""
    load, versions = os.getloadavg()[0], f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{platform.platform()}, {os.cpu_count()} CPUs, load {load:.1f}, {versions}"


def load_at_the_end(threads: int) -> str:
    """The load, and what it says of the times."""
    return f"load at the end {os.getloadavg()[0]:.1f}: with more than {threads}, threads waited for other processes"
