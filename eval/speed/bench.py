"""Measures prefill, decode step, cache and peak memory of models, at every batch and context, and prints a table of them.

Figures are for forward passes only: no tokenizer, no sampling, random token ids.
"""

import gc
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from attention import absorb, kernels, pack
from attention.errors import Failure, Refusal
from attention.grouped import is_packed
from attention.latent import is_absorbed
from attention.spec import AttentionSpec, dtype_bytes
from eval.inputs.loading import compute_dtype, load, require_causal
from eval.inputs.source import Source, require_contexts
from eval.machine.capacity import count_parameters
from eval.machine.device import compute_device, free_memory, hardware, memory_for, timed
from eval.speed.workload import Workload
from eval.terminal.progress import Progress, silent, stage
from eval.terminal.text import bytes_text, markdown, table

_log = logging.getLogger("kvfold")
_WARM_UP = 3  # steps
Case = tuple[int, int]  # a batch size, and tokens per sequence
_HEADER = ("batch", "context", "model", "attention", "runtime", "prefill, ms", "step, ms", "cache", "peak memory")
_NUMBERS = (0, 1, 5, 6, 7, 8)
_PEAK = len(_HEADER) - 1  # which a GPU alone has


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
        stock: Also measure models with latent or grouped attention as transformers runs them.
    """

    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    steps: int = 20
    rounds: int = 5
    dtype: str = "auto"
    device: str = "auto"
    stock: bool = False


class ModelRun(NamedTuple):
    """A model in one runtime, ours (if it supports the class; never MHA) or transformers'; a row per batch and context."""

    source: Source
    spec: AttentionSpec
    dtype: str
    ours: bool
    weight_bytes: int

    def cache_bytes(self, batch: int, context: int) -> int:
        return batch * self.spec.cache_bytes(self.dtype, context, static=True)


def run(sources: Sequence[Source], settings: BenchSettings, progress: Progress = silent) -> dict[str, Any]:
    """Measure models, one after another.

    Args:
        sources: The models.
        settings: How to measure.
        progress: Called with the number of finished rounds.

    Returns:
        `{"kvfold", "setup", "models"}`: machine, versions and options, and for each model and runtime its `cases`, one for each
        batch and context. Units: seconds, bytes, tokens.

    Raises:
        Refusal: The settings or the configs do not allow it.
        Failure: A model cannot be loaded, or there is not enough memory.
    """
    runs, cases = check(sources, settings)
    device = compute_device(settings.device)
    setup = hardware(device) | {"rounds": settings.rounds, "steps": settings.steps}  # with the load before the first round
    _require_memory(runs, cases, device)
    found: list[dict[str, Any]] = []
    with stage(progress, "bench", len(runs) * len(cases) * settings.rounds, "round") as done:
        for each in runs:
            try:
                found.append(_entry(each, cases, device, settings, done))
            finally:
                gc.collect()
                torch.cuda.empty_cache()  # does nothing without a GPU
    return {"kvfold": version("kvfold"), "setup": setup, "models": found}


def check(sources: Sequence[Source], settings: BenchSettings) -> tuple[list[ModelRun], list[Case]]:
    """Check settings and configs. Returns the models in their runtimes, and the sizes to measure at."""
    device = compute_device(settings.device)
    for name, least in (("batches", 1), ("contexts", 2), ("steps", 1), ("rounds", 1)):
        value = getattr(settings, name)
        if any(each < least for each in (value if isinstance(value, tuple) else (value,))):
            raise Refusal(f"{name} of {value} cannot be measured: it must be at least {least}")
    for source in sources:
        require_causal(source)
    contexts = require_contexts(sources, settings.contexts)
    runs = []
    for source in sources:
        spec, dtype = AttentionSpec.from_config(source.config), compute_dtype(source, settings.dtype, device.type)
        weights, ours = count_parameters(source.config) * dtype_bytes(dtype), spec.kind != "MHA"
        runtimes = (True, False) if ours and settings.stock else (ours,)
        runs += [ModelRun(source, spec, dtype, each, weights) for each in runtimes]
    if settings.stock and not any(run.ours for run in runs):
        raise Refusal(
            "none of these models has latent or grouped attention, so there is no stock runtime to compare with",
            hint="leave --stock out",
        )
    # The largest first, so that a lack of memory shows at once.
    return runs, sorted(dict.fromkeys(itertools.product(settings.batches, contexts)), key=math.prod, reverse=True)


def _require_memory(runs: Sequence[ModelRun], cases: Sequence[Case], device: torch.device) -> None:
    """Raise `Failure` if weights and cache alone exceed the free memory; on a CPU, the system would kill the process."""
    free = free_memory(device)
    for run in runs:
        batch, context = max(cases, key=lambda case: run.cache_bytes(*case))
        cache = run.cache_bytes(batch, context)
        if run.weight_bytes + cache > free:
            most = int((free - run.weight_bytes) // run.cache_bytes(1, context))
            raise Failure(
                f"{run.source.name} at batch {batch} × context {context} takes {bytes_text(run.weight_bytes)} of weights and "
                f"{bytes_text(cache)} of KV cache in {run.dtype}; {device} has {bytes_text(free)} free",
                hint=f"use --batch {most} or less at this context"
                if most > 0
                else "use a shorter --context or a smaller --dtype",
            )


def _entry(
    run: ModelRun, cases: Sequence[Case], device: torch.device, settings: BenchSettings, done: Callable[[int], None]
) -> dict[str, Any]:
    """An entry of "models" in bench.json. The model runs unchanged if our runtime does not support its class."""
    with load(run.source, run.dtype, str(device)) as model:
        if run.ours:
            try:
                (pack if run.spec.kv_lora_rank is None else absorb)(model)
            except Refusal as refusal:
                _log.warning("%s runs as transformers has it: %s", run.source.name, refusal)
        absorbed = any(map(is_absorbed, model.modules()))
        rows = [_measure(run, model, case, settings, done) for case in cases]
        return {
            "name": run.source.name,
            "path": run.source.reference,
            "kind": run.spec.kind,
            "runtime": "absorbed" if absorbed else "packed" if any(map(is_packed, model.modules())) else "transformers",
            "class": type(model).__name__,
            "attention": model.config._attn_implementation,
            "dtype": run.dtype,
            "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),  # tied ones count once
            "cases": sorted(rows, key=lambda row: (row["batch"], row["context"])),
        }


@torch.no_grad()  # as in `generate`
def _measure(run: ModelRun, model: Any, case: Case, settings: BenchSettings, done: Callable[[int], None]) -> dict[str, Any]:
    name, (batch, context) = run.source.name, case
    what = f"{name} at batch {batch} × context {context} in {run.dtype}"
    with memory_for(what, "use a smaller --batch or a shorter --context; `convert plan` says what fits by arithmetic"):
        work = Workload(model, batch, context)
        device = work.ids.device
        work.to_start()
        work.prefill()
        work.check_cache(name, run.spec, run.dtype)
        with kernels.watched() as served:
            work.check_logits(name, run.dtype)
        backend, reason = next(iter(served.items()), (None, None))
        peak = _peak(work)
        timed(device, work.step, work.to_last, _WARM_UP)
        prefills, steps = list[float](), list[float]()
        for _ in range(settings.rounds):
            prefills += timed(device, work.prefill, work.to_start, 1)
            timed(device, work.step, work.to_last, 1)  # the first step after other work is slower
            steps.append(sum(timed(device, work.step, work.to_last, settings.steps)) / settings.steps)
            done(1)
    return {
        "batch": batch,
        "context": context,
        "backend": backend,
        "backend_reason": reason,
        "prefill_chunk": work.chunk,
        "cache_bytes": work.cache_bytes,
        "peak_bytes": peak,
        "prefill_seconds": _spread(prefills),
        "step_seconds": _spread(steps),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values}


def _peak(work: Workload) -> int | None:
    """The peak bytes of tensors during a prefill and a step."""
    device = work.ids.device
    if device.type != "cuda":
        return None
    work.to_start()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work.prefill()
    work.to_last()
    work.step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device))


def to_markdown(report: dict[str, Any]) -> str:
    """One GitHub table, grouped by batch and context, and lines below it. Rates are medians with both extremes."""
    cases = zip(*([(model, row) for row in model["cases"]] for model in report["models"]), strict=True)
    rows = [_cells(model, row) for case in cases for model, row in case]
    columns = len(_HEADER) if any(row[_PEAK] for row in rows) else _PEAK
    shown = table(_HEADER[:columns], [row[:columns] for row in rows], _NUMBERS)
    return "\n\n".join([shown, *map(markdown, _lines(report))]) + "\n"


def _cells(model: dict[str, Any], row: dict[str, Any]) -> list[str]:
    runtime = model["runtime"] + (f", {row['backend']}" if row["backend"] else "")
    times = [_milliseconds(row[key]) for key in ("prefill_seconds", "step_seconds")]
    peak = "" if row["peak_bytes"] is None else bytes_text(row["peak_bytes"])
    sizes = [f"{row['batch']:,}", f"{row['context']:,}"]
    return [*sizes, model["name"], model["kind"], runtime, *times, bytes_text(row["cache_bytes"]), peak]


def _milliseconds(seconds: dict[str, Any]) -> str:
    values = [1e3 * seconds[key] for key in ("median", "min", "max")]
    median, low, high = (f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".") for value in values)
    return f"{median} ({low} to {high})"


def _lines(report: dict[str, Any]) -> list[str]:
    setup, models = report["setup"], report["models"]
    rows = [(model, row) for model in models for row in model["cases"]]
    cut = [f"{model['name']} {row['prefill_chunk']:,}" for model, row in rows if row["prefill_chunk"] < row["context"]]
    dtypes, attentions = (" and ".join(dict.fromkeys(model[key] for model in models)) for key in ("dtype", "attention"))
    lines = [
        f"{setup['name']} ({setup['device']}), cores: {setup['cores']}, threads: {setup['threads']}; torch {setup['torch']}, "
        f"transformers {setup['transformers']}; {dtypes}, {attentions} attention. "
        f"Medians (least to most) of rounds: {setup['rounds']}, each of one prefill and steps: {setup['steps']}. A step is a "
        "forward pass of the last token of each sequence."
    ]
    if cut:
        lines.append(f"Prefills were cut into chunks of so many tokens: {', '.join(dict.fromkeys(cut))}.")
    return lines + [f"Warning: {reason}." for reason in dict.fromkeys(row["backend_reason"] for _, row in rows) if reason]
