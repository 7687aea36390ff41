"""Devices: checks of `--device`, free memory, out-of-memory errors, the input device of a loaded model, times, facts."""

import contextlib
import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from attention.errors import Failure, Refusal

# Messages of the CUDA runtime, Triton's driver and torch's allocator; of torch on a CPU; of cuBLAS.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def compute_device(name: str) -> Any:
    """The `torch.device` of a `--device` argument: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ….

    Raises:
        Refusal: It is not a device name.
        Failure: This machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise Refusal(f"no device {name!r} (choose auto, cpu, cuda or cuda:N)") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise Refusal(f"device {name!r} is not supported (choose auto, cpu, cuda or cuda:N)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Failure(f"this machine has no device {name!r}: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return device


def rough(device: Any) -> Any:
    """The dtype of products that may be rounded: bfloat16 where the machine multiplies that faster, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    read = getattr(torch.cpu, "get_capabilities", dict)  # older versions of torch do not tell
    found: dict[str, object] = read() if device.type == "cpu" else {}
    return torch.bfloat16 if found.get("avx512_bf16") or found.get("amx_bf16") else torch.float32


def free_memory(device: Any) -> int:
    """Bytes still available to tensors on `device`: a GPU's free memory, or this machine's."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # reserved by torch
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return int(psutil.virtual_memory().available)


def whole_memory(device: Any) -> int:
    """Bytes of a GPU's memory, or of this machine's, whatever uses them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


@contextlib.contextmanager
def memory_for(what: str, hint: str) -> Iterator[None]:
    """Turn errors about memory into `Failure` with this hint."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise Failure(f"not enough memory for {what}: {str(error).splitlines()[0][:200]}", hint=hint) from error


def input_device(model: Any) -> Any:
    """The device for the token ids of `model`: its own or, if its embedding is offloaded, the one where its hooks compute."""
    return model.device if model.device.type != "meta" else model._hf_hook.execution_device


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` means a lack of memory: only torch's own allocator on a GPU has an exception class for that."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


def trim_memory() -> None:
    """Return freed memory to the system where the C library is glibc, which keeps blocks of up to 32 MB.

    The aligned blocks that torch allocates leave holes there that the next block of the same size does not fit into: the survey
    of a model of width 2048 grew by 70 MB per layer.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library, or none to ask
        ctypes.CDLL(None).malloc_trim(0)


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


def hardware(device: torch.device) -> dict[str, Any]:
    """Conditions of a timing besides the model: the processor of `device`, cores, threads, versions, the current load."""
    import transformers

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
