"""Times work on a device: a clock that waits for the device, medians with their spread, and facts about the machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


def timed(device: torch.device, work: Callable[[], Any], before: Callable[[], Any], times: int) -> list[float]:
    """The seconds of each of `times` runs of `work`; `before` runs ahead of each and is not timed.

    On a GPU, CUDA events mark begin and end in the order of its own work, and the CPU waits for it once, at the end.
    """
    if device.type != "cuda":
        return [_seconds(work, before) for _ in range(times)]
    marks = []
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            work()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _seconds(work: Callable[[], Any], before: Callable[[], Any]) -> float:
    before()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The median, minimum and maximum of `values`, and `values` themselves as "rounds"."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": list(values)}


def hardware(device: torch.device) -> dict[str, Any]:
    """Conditions of a timing besides the model: the processor of `device`, cores, threads, versions, the current load."""
    is_gpu = device.type == "cuda"
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if is_gpu else _cpu_name(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_gpu else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_gpu else None,
        "transformers": transformers.__version__,
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
