"""Measures prefill, decode step, cache and peak memory of models side by side, at every batch and context.

Figures are for forward passes only: no tokenizer, no sampling, random token ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from attention import kernels
from attention.errors import Failure, Refusal
from eval.inputs.loading import require_causal
from eval.inputs.source import Source, require_contexts
from eval.machine.clock import hardware, spread, timed
from eval.machine.device import compute_device, free_memory, memory_for, require_device
from eval.speed.model_run import ModelRun, describe, loaded, model_runs
from eval.speed.workload import Workload, weight_bytes
from eval.terminal.progress import Progress, silent, stage
from eval.terminal.tables import bytes_text

_WARM_UP = 3  # steps; the second one records CUDA graphs


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a measurement.

    Attributes:
        batches: Batch sizes.
        contexts: Tokens per sequence that a decode step attends over; empty for min(2048, the models' smallest limit).
        steps: Decode steps per round.
        rounds: Rounds per model, batch and context.
        dtype: Dtype of weights and cache; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", …
        compile: Run decode steps through torch.compile.
        stock: Also measure models with latent or grouped attention as transformers runs them.
        backend: The backend of torch.compile.
    """

    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    steps: int = 20
    rounds: int = 5
    dtype: str = "auto"
    device: str = "auto"
    compile: bool = False
    stock: bool = False
    backend: str = "inductor"


class Case(NamedTuple):
    """A batch size, and tokens per sequence."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch} × context {self.context}"


def run(sources: Sequence[Source], settings: BenchSettings, progress: Progress = silent) -> dict[str, Any]:
    """Measure models side by side.

    If all models fit into half of the free memory together, they take turns in every round; otherwise, or if compiled, they
    are measured one after another.

    Args:
        sources: The models.
        settings: How to measure.
        progress: Called with the number of finished rounds.

    Returns:
        `{"kvfold", "setup", "models"}`, described in docs/bench.md. Units: seconds, bytes, tokens.

    Raises:
        Refusal: The settings or the configs do not allow it.
        Failure: A model cannot be loaded, or there is not enough memory.
    """
    runs, cases = check(sources, settings)
    device = compute_device(settings.device)
    setup = hardware(device)  # includes the load before the first round
    _require_memory(runs, cases, device)
    together = len(runs) > 1 and not settings.compile and _fit_together(runs, cases, device)
    groups = [runs] if together else [[run] for run in runs]
    total = len(runs) * len(cases) * settings.rounds
    found: list[dict[str, Any]] = []
    with stage(progress, "bench", total, "round") as done:
        for group in groups:
            with loaded(group, device) as models:
                figures = [describe(*pair) for pair in zip(group, models, strict=True)]
                for case in cases:
                    rows = _measure(group, models, case, settings, done)
                    for entry, row in zip(figures, rows, strict=True):
                        entry["cases"].append(row)
            found += figures
    for entry in found:
        entry["cases"].sort(key=lambda row: (row["batch"], row["context"]))
    order = None if len(runs) == 1 else "alternating" if together else "one after another"
    asked = {"rounds": settings.rounds, "steps": settings.steps, "compile": settings.compile, "order": order}
    return {"kvfold": version("kvfold"), "setup": setup | asked, "models": found}


def check(sources: Sequence[Source], settings: BenchSettings) -> tuple[list[ModelRun], list[Case]]:
    """Check settings and configs. Returns the models in their runtimes, and the sizes to measure at."""
    require_device(settings.device)
    for name, least in (("batches", 1), ("contexts", 2), ("steps", 1), ("rounds", 1)):
        value = getattr(settings, name)
        if any(each < least for each in (value if isinstance(value, tuple) else (value,))):
            raise Refusal(f"{name} of {value} cannot be measured: it must be at least {least}")
    for source in sources:
        require_causal(source)
    contexts = require_contexts(sources, settings.contexts)
    device = compute_device(settings.device)
    runs = [run for source in sources for run in model_runs(source, settings.dtype, device, settings.stock)]
    if settings.stock and not any(run.ours for run in runs):
        raise Refusal(
            "none of these models has latent or grouped attention, so there is no stock runtime to compare with",
            hint="leave --stock out",
        )
    # The largest first, so that a lack of memory shows at once.
    cases = [Case(*size) for size in itertools.product(settings.batches, contexts)]
    return runs, sorted(dict.fromkeys(cases), key=lambda case: -case.batch * case.context)


def _require_memory(runs: Sequence[ModelRun], cases: Sequence[Case], device: torch.device) -> None:
    """Fail if weights and cache alone exceed the free memory; on a CPU, the system would kill the process instead.

    Raises:
        Failure: They exceed it.
    """
    free = free_memory(device)
    for run in runs:
        case = max(cases, key=lambda case: run.cache_bytes(*case))
        cache = run.cache_bytes(*case)
        if run.weight_bytes + cache > free:
            most = int((free - run.weight_bytes) // run.cache_bytes(1, case.context))
            raise Failure(
                f"{run.source.name} at {case} takes {bytes_text(run.weight_bytes)} of weights and {bytes_text(cache)} "
                f"of KV cache in {run.dtype}; {device} has {bytes_text(free)} free",
                hint=f"use --batch {most} or less at this context"
                if most > 0
                else "use a shorter --context or a smaller --dtype",
            )


def _fit_together(runs: Sequence[ModelRun], cases: Sequence[Case], device: torch.device) -> bool:
    caches = max(sum(run.cache_bytes(*case) for run in runs) for case in cases)
    # Half, since prefills need memory too, and how much is known only afterwards.
    return sum(run.weight_bytes for run in runs) + caches <= free_memory(device) / 2


@torch.no_grad()  # as in `generate`
def _measure(
    runs: Sequence[ModelRun], models: Sequence[Any], case: Case, settings: BenchSettings, done: Callable[[int], None]
) -> list[dict[str, Any]]:
    """One row for each of `runs`, which take turns; a different one begins each round."""
    workloads, rows = [], []
    for run, model in zip(runs, models, strict=True):
        with _memory_for(run, case):
            workloads.append(Workload(model, *case))
            rows.append({**case._asdict(), **_warm_up(workloads[-1], run, settings)})
    prefills: list[list[float]] = [[] for _ in rows]
    steps: list[list[float]] = [[] for _ in rows]
    for turn in range(settings.rounds):
        for index in range(len(rows))[:: -1 if turn % 2 else 1]:
            work, device = workloads[index], workloads[index].ids.device
            with _memory_for(runs[index], case):
                prefills[index] += timed(device, work.prefill, work.to_start, 1)
                timed(device, work.step, work.to_last, 1)  # the first step after other work is slower
                taken = timed(device, work.step, work.to_last, settings.steps)
            steps[index].append(sum(taken) / len(taken))
            done(1)
    for row, prefill, step in zip(rows, prefills, steps, strict=True):
        row |= {"prefill_seconds": spread(prefill), "step_seconds": spread(step)}
    return rows


def _warm_up(work: Workload, run: ModelRun, settings: BenchSettings) -> dict[str, Any]:
    """Everything but times: the backend, the memory, the chunks of the prefill."""
    device, name = work.ids.device, run.source.name
    work.fill()
    work.check_cache(name, run.spec, run.dtype)
    with kernels.watched() as served:
        work.check_logits(name, run.dtype)
    backend, reason = next(iter(served.items()), (None, None))
    found: dict[str, Any] = {
        "backend": backend,
        "backend_reason": reason,
        "prefill_chunk": work.chunk,
        "cache_bytes": work.cache_bytes,
        # Before compilation, since replaying a CUDA graph allocates nothing.
        "peak_bytes": _peak(work),
    }
    if settings.compile:
        work.compile(settings.backend)
        work.check_logits(name, run.dtype)
    timed(device, work.step, work.to_last, _WARM_UP)
    return found


def _peak(work: Workload) -> int | None:
    """The peak bytes of tensors during a prefill and a step, with this model's weights and cache but no other model's."""
    device = work.ids.device
    if device.type != "cuda":
        return None
    work.to_start()
    torch.cuda.synchronize(device)
    idle = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work.prefill()
    work.to_last()
    work.step()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - idle
    return weight_bytes(work.model) + work.cache_bytes + activations


def _memory_for(run: ModelRun, case: Case) -> AbstractContextManager[None]:
    what = f"{run.source.name} at {case} in {run.dtype}"
    return memory_for(what, "use a smaller --batch or a shorter --context; `convert plan` says what fits by arithmetic")
