"""A model in one runtime, as `eval.speed.bench` measures it: its memory, loading and freeing it, and its description."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from attention import absorb, pack
from attention.errors import Refusal
from attention.grouped import is_packed
from attention.latent import LatentAttention
from attention.spec import AttentionSpec, dtype_bytes
from eval.inputs.loading import compute_dtype, load
from eval.inputs.source import Source
from eval.machine.capacity import count_parameters
from eval.speed.workload import weight_bytes

_log = logging.getLogger("kvfold")


class ModelRun(NamedTuple):
    """A model in one runtime, ours (if it supports the class) or transformers'; it gets one row per batch and context."""

    source: Source
    spec: AttentionSpec
    dtype: str
    ours: bool
    weight_bytes: int

    def cache_bytes(self, batch: int, context: int) -> int:
        return batch * self.spec.cache_bytes(self.dtype, context, static=True)


def model_runs(source: Source, dtype: str, device: torch.device, stock: bool) -> list[ModelRun]:
    """`source` in each runtime to measure, from its config alone; `stock` adds transformers' runtime to ours.

    MHA only runs in transformers' runtime.
    """
    spec = AttentionSpec.from_config(source.config)
    dtype = compute_dtype(source, dtype, device.type)
    weights = count_parameters(source.config) * dtype_bytes(dtype)
    ours = spec.kind != "MHA"
    return [ModelRun(source, spec, dtype, way, weights) for way in ((True, False) if ours and stock else (ours,))]


@contextlib.contextmanager
def loaded(runs: Sequence[ModelRun], device: torch.device) -> Iterator[list[Any]]:
    """The models of `runs` on `device`, each in its runtime. The end of the block frees them and their memory."""
    try:
        with contextlib.ExitStack() as stack:
            models = [stack.enter_context(_loaded(run, device)) for run in runs]
            try:
                yield models
            finally:
                models.clear()
    finally:
        torch.compiler.reset()  # compiled code holds its model, and CUDA graphs hold their memory
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU


@contextlib.contextmanager
def _loaded(run: ModelRun, device: torch.device) -> Iterator[Any]:
    """One model, in our runtime or, if that does not support its class, unchanged; the report names the runtime."""
    with load(run.source, run.dtype, str(device)) as model:
        if run.ours:
            try:
                (pack if run.spec.kv_lora_rank is None else absorb)(model)
            except Refusal as refusal:
                _log.warning("%s runs as transformers has it: %s", run.source.name, refusal)
        yield model


def _runtime(model: Any) -> str:
    """The runtime of the attention of `model`: "absorbed", "packed" or "transformers"."""
    if any(isinstance(module, LatentAttention) for module in model.modules()):
        return "absorbed"
    return "packed" if any(map(is_packed, model.modules())) else "transformers"


def describe(run: ModelRun, model: Any) -> dict[str, Any]:
    """An entry of "models" in bench.json, without its measurements."""
    return {
        "name": run.source.name,
        "path": run.source.reference,
        "kind": run.spec.kind,
        "runtime": _runtime(model),
        "class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "dtype": run.dtype,
        "weight_bytes": weight_bytes(model),
        "cases": [],
    }
