"""Models in, their speed and memory out: prefill and decode of each at every batch and context, beside the first.

The figures are those of a forward pass: no tokenizer, no sampling, random token ids.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from attention import absorb
from attention.errors import Failure, Refusal
from attention.latent import LatentAttention
from attention.spec import AttentionSpec, dtype_bytes
from eval import evaluate
from eval.capacity import GIGABYTE, count_parameters
from eval.clock import hardware, spread, timed
from eval.device import compute_device, free_memory, require_device
from eval.source import Source
from eval.workload import MOST_SEQUENCES, Workload, largest_batch, out_of_memory, weight_bytes

_WARM_UP = 3  # steps; CUDA graphs are recorded in the second
_NO_PEAK = "not measured on a CPU"
_NO_LARGEST = "not searched for on a CPU, where memory that is not there is lent and the process killed"


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        batches: Sequences at once.
        contexts: Tokens of each that a decode step attends over; empty for min(2048, the models' smallest limit).
        steps: Decode steps per round.
        rounds: Of each model at every batch and context.
        dtype: Of weights and cache; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", …
        compile: Run decode steps through torch.compile.
        stock: Measure models with latent attention once more, with the classes of transformers as they are.
        largest_batch: On a GPU, find the largest batch that fits, by filling its memory.
        quiet: No progress bar.
        backend: Of torch.compile.
    """

    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = ()
    steps: int = 20
    rounds: int = 5
    dtype: str = "auto"
    device: str = "auto"
    compile: bool = False
    stock: bool = False
    largest_batch: bool = True
    quiet: bool = False
    backend: str = "inductor"


class Entrant(NamedTuple):
    """A model in one runtime: a row of the table at every batch and context."""

    source: Source
    spec: AttentionSpec
    dtype: str
    absorbed: bool
    weight_bytes: int

    def cache_bytes(self, batch: int, context: int) -> int:
        return batch * context * self.spec.bytes_per_token(self.dtype)


class Case(NamedTuple):
    """Sequences at once, and tokens of each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch} × context {self.context}"


def run(sources: Sequence[Source], settings: Settings) -> dict[str, Any]:
    """Measure models side by side.

    If all fit into half of the free memory together they take turns in every round; otherwise, and if they are compiled,
    one is measured after another.

    Args:
        sources: The first is what the others are compared with.
        settings: How.

    Returns:
        `{"kvfold", "setup", "models"}`, as docs/bench.md gives it. Seconds, bytes, tokens and 10⁹ bytes per second.

    Raises:
        Refusal: The configs do not allow it.
        Failure: A model cannot be loaded, or memory does not suffice.
    """
    entrants, cases = check(sources, settings)
    device = compute_device(settings.device)
    setup = hardware(device)  # with the load before the first round
    _require_memory(entrants, cases, device)
    together = len(entrants) > 1 and not settings.compile and _fit_together(entrants, cases, device)
    groups = [entrants] if together else [[entrant] for entrant in entrants]
    total = len(entrants) * len(cases) * settings.rounds
    found: list[dict[str, Any]] = []
    # None: tqdm draws only where stderr is a terminal.
    with tqdm(total=total, desc="rounds", file=sys.stderr, disable=True if settings.quiet else None) as bar:
        for group in groups:
            with _loaded(group, settings, device) as models:
                figures = [_describe(*pair) for pair in zip(group, models, strict=True)]
                for case in cases:
                    rows = _measure(group, models, case, settings, bar.update)
                    for entry, row in zip(figures, rows, strict=True):
                        entry["cases"].append(row)
            found += figures
    _add_largest(entrants, found, settings, device)
    _add_ratios(found)
    order = None if len(entrants) == 1 else "alternating" if together else "one after another"
    asked = {"rounds": settings.rounds, "steps": settings.steps, "compile": settings.compile, "order": order}
    return {"kvfold": version("kvfold"), "setup": setup | asked, "models": found}


def check(sources: Sequence[Source], settings: Settings) -> tuple[list[Entrant], list[Case]]:
    """Everything that can be refused from settings and configs: what will be measured, and at which sizes."""
    require_device(settings.device)
    for name, least in (("batches", 1), ("contexts", 2), ("steps", 1), ("rounds", 1)):
        value = getattr(settings, name)
        if any(each < least for each in (value if isinstance(value, tuple) else (value,))):
            raise Refusal(f"{name} of {value} cannot be measured: it must be at least {least}")
    for source in sources:
        evaluate.require_causal(source)
    contexts = evaluate.require_contexts(sources, settings.contexts)
    device = compute_device(settings.device)
    entrants = [entrant for source in sources for entrant in _entrants(source, settings, device)]
    if settings.stock and all(entrant.spec.kv_lora_rank is None for entrant in entrants):
        raise Refusal(
            "none of these models has latent attention, which a stock runtime could be compared for", hint="leave --stock out"
        )
    # The largest first: what does not fit fails at once.
    cases = [Case(*size) for size in itertools.product(settings.batches, contexts)]
    return entrants, sorted(dict.fromkeys(cases), key=lambda case: -case.batch * case.context)


def _entrants(source: Source, settings: Settings, device: torch.device) -> list[Entrant]:
    spec = AttentionSpec.from_config(source.config)
    dtype = settings.dtype if settings.dtype != "auto" else ("float32" if device.type == "cpu" else source.dtype)
    weights = count_parameters(source.config, source.trust_remote_code) * dtype_bytes(dtype)
    latent = spec.kv_lora_rank is not None
    return [Entrant(source, spec, dtype, way, weights) for way in ((True, False) if latent and settings.stock else (latent,))]


def _require_memory(entrants: Sequence[Entrant], cases: Sequence[Case], device: torch.device) -> None:
    """Fail where weights and cache alone exceed what is free; a CPU would not say so, but kill the process.

    Raises:
        Failure: They do.
    """
    free = free_memory(device)
    for entrant in entrants:
        case = max(cases, key=lambda case: entrant.cache_bytes(*case))
        cache = entrant.cache_bytes(*case)
        if entrant.weight_bytes + cache > free:
            most = int((free - entrant.weight_bytes) // entrant.cache_bytes(1, case.context))
            raise Failure(
                f"{entrant.source.name} at {case} takes {_gigabytes(entrant.weight_bytes)} of weights and {_gigabytes(cache)} "
                f"of KV cache in {entrant.dtype}; {device} has {_gigabytes(free)} free",
                hint=f"use --batch {most} or less at this context"
                if most > 0
                else "use a shorter --context or a smaller --dtype",
            )


def _fit_together(entrants: Sequence[Entrant], cases: Sequence[Case], device: torch.device) -> bool:
    caches = max(sum(entrant.cache_bytes(*case) for entrant in entrants) for case in cases)
    # Half: prefills need room as well, and how much is known only afterwards.
    return sum(entrant.weight_bytes for entrant in entrants) + caches <= free_memory(device) / 2


@contextlib.contextmanager
def _loaded(entrants: Sequence[Entrant], settings: Settings, device: torch.device) -> Iterator[list[Any]]:
    """The models of `entrants` on `device`, each in its runtime; freed when the block ends."""
    with contextlib.ExitStack() as stack:
        models = []
        for entrant in entrants:
            how = evaluate.Settings(dtype=entrant.dtype, device=str(device), quiet=settings.quiet)
            model = stack.enter_context(evaluate.load(entrant.source, how))
            models.append(_absorbed(model, entrant, settings.quiet) if entrant.absorbed else model)
        yield models
        models.clear()
    gc.collect()
    torch.cuda.empty_cache()  # nothing without a GPU


def _absorbed(model: Any, entrant: Entrant, quiet: bool) -> Any:
    """`model` in our runtime or, where that does not know its class, as it is: the report names what each ran in."""
    try:
        return absorb(model)
    except Refusal as refusal:
        if not quiet:
            print(f"note: {entrant.source.name} runs as transformers has it: {refusal}", file=sys.stderr)
        return model


def _describe(entrant: Entrant, model: Any) -> dict[str, Any]:
    return {
        "name": entrant.source.name,
        "path": entrant.source.reference,
        "kind": entrant.spec.kind,
        "runtime": "absorbed" if any(isinstance(m, LatentAttention) for m in model.modules()) else "transformers",
        "class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "dtype": entrant.dtype,
        "weight_bytes": weight_bytes(model),
        "kv_bytes_per_token": entrant.spec.bytes_per_token(entrant.dtype),
        "cases": [],
    }


@torch.no_grad()  # as in `generate`
def _measure(
    entrants: Sequence[Entrant], models: Sequence[Any], case: Case, settings: Settings, progress: Callable[[], Any]
) -> list[dict[str, Any]]:
    """One row for each of `entrants`, which take turns; who is first changes from round to round."""
    workloads, rows = [], []
    for entrant, model in zip(entrants, models, strict=True):
        with _memory_for(entrant, case):
            workloads.append(Workload(model, *case))
            rows.append({**case._asdict(), **_warm_up(workloads[-1], entrant, settings)})
    prefills: list[list[float]] = [[] for _ in rows]
    steps: list[list[float]] = [[] for _ in rows]
    for turn in range(settings.rounds):
        for index in range(len(rows))[:: -1 if turn % 2 else 1]:
            work, device = workloads[index], workloads[index].ids.device
            with _memory_for(entrants[index], case):
                prefills[index] += timed(device, work.prefill, work.to_start, 1)
                timed(device, work.step, work.to_last, 1)  # the first after something else is slower
                taken = timed(device, work.step, work.to_last, settings.steps)
            steps[index].append(sum(taken) / len(taken))
            progress()
    for index, row in enumerate(rows):
        row |= _speed(row, models[index], workloads[index].cache_bytes, prefills[index], steps[index])
    return rows


def _warm_up(work: Workload, entrant: Entrant, settings: Settings) -> dict[str, Any]:
    """Everything but times: what memory the work took, how the prefill was cut, how long compilation took."""
    device = work.ids.device
    work.fill()
    work.check(entrant.source.name, entrant.spec, entrant.dtype)
    compiling = None
    if settings.compile:
        work.compile(settings.backend)
        (compiling,) = timed(device, work.step, work.to_last, 1)
    timed(device, work.step, work.to_last, _WARM_UP)
    return {
        "prefill_chunk": work.chunk,
        "compile_seconds": compiling,
        "peak_prefill_bytes": _peak(work, work.to_start, work.prefill),
        "peak_decode_bytes": _peak(work, work.to_last, work.step),
        "peak_reason": _NO_PEAK if device.type == "cpu" else None,
    }


def _peak(work: Workload, before: Callable[[], Any], run: Callable[[], Any]) -> int | None:
    """The most bytes of tensors that `run` makes after `before`: with the model's own weights and cache, and no other's."""
    device = work.ids.device
    if device.type != "cuda":
        return None
    before()
    torch.cuda.synchronize(device)
    idle = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - idle
    return weight_bytes(work.model) + work.cache_bytes + activations


def _speed(row: dict[str, Any], model: Any, cache: int, prefills: list[float], steps: list[float]) -> dict[str, Any]:
    """The figures that follow from times: seconds of a prefill and of a step, one a round."""
    prefill, step = spread(prefills), spread(steps)
    weights = _weights_read(model)
    return {
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": row["batch"] * row["context"] / prefill["median"],
        "step_seconds": step,
        "decode_tokens_per_second": row["batch"] / step["median"],
        "cache_bytes": cache,
        "cache_gb_per_second": cache / step["median"] / GIGABYTE,
        "weights_and_cache_gb_per_second": None if weights is None else (weights + cache) / step["median"] / GIGABYTE,
    }


def _weights_read(model: Any) -> int | None:
    """Bytes of weights that a decode step reads: all but an embedding that is not the head too; None with experts."""
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        return None  # how many are read is up to the router
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = 0 if head is not None and head.weight is embedding.weight else embedding.weight.nbytes
    return weight_bytes(model) - looked_up


@contextlib.contextmanager
def _memory_for(entrant: Entrant, case: Case) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise Failure(
            f"not enough memory for {entrant.source.name} at {case} in {entrant.dtype}: {str(error).splitlines()[0][:200]}",
            hint="use a smaller --batch or a shorter --context; `convert plan` says what fits by arithmetic",
        ) from error


def _add_largest(entrants: Sequence[Entrant], found: list[dict[str, Any]], settings: Settings, device: torch.device) -> None:
    """The largest batch that fits at each context, with one model in memory at a time, or why there is none."""
    for entrant, entry in zip(entrants, found, strict=True):
        contexts = sorted({row["context"] for row in entry["cases"]})
        sizes: dict[int, tuple[int | None, str | None]]
        if device.type == "cpu" or not settings.largest_batch:
            sizes = dict.fromkeys(contexts, (None, _NO_LARGEST if device.type == "cpu" else "not asked for"))
        else:
            with _loaded([entrant], settings, device) as models:
                sizes = {context: _largest(entrant, models[0], context, device) for context in contexts}
        for row in entry["cases"]:
            row["largest_batch"], row["largest_batch_reason"] = sizes[row["context"]]


@torch.no_grad()
def _largest(entrant: Entrant, model: Any, context: int, device: torch.device) -> tuple[int | None, str | None]:
    try:
        size = largest_batch(model, context, free_memory(device), entrant.cache_bytes(1, context))
    except RuntimeError as error:  # kernels have limits of their own; everything else has been measured by now
        return None, f"the search failed for {entrant.source.name}: {' '.join(str(error).split())[:200]}"
    return size, f"the search ends at {MOST_SEQUENCES}" if size == MOST_SEQUENCES else None


def _add_ratios(found: list[dict[str, Any]]) -> None:
    """How many times the tokens per second of the first model each of the others makes."""
    for entry in found:
        entry["cases"].sort(key=lambda row: (row["batch"], row["context"]))
    for entry in found:
        for row, first in zip(entry["cases"], found[0]["cases"], strict=True):
            for phase in ("prefill", "decode"):
                row[f"{phase}_ratio"] = row[f"{phase}_tokens_per_second"] / first[f"{phase}_tokens_per_second"]


def _gigabytes(size: int) -> str:
    return f"{size / GIGABYTE:,.0f} GB" if size >= 100 * GIGABYTE else f"{size / GIGABYTE:.3g} GB"
