"""The size of a model's KV cache: predicted by the one formula, and measured on a live cache object."""

from __future__ import annotations

from typing import Any

import torch

from attention.errors import Failure
from attention.spec import AttentionSpec, dtype_bytes
from attention.versions import CACHE
from eval.machine.device import input_device

_PROMPT = 16


def measured_bytes_per_token(model: Any, dtype: str) -> float:
    """Bytes per token of the cache that `model` fills over a short prompt, converted to storage in `dtype`.

    The model may run in another dtype than its checkpoint's (fp32 on a CPU): values are counted, and converted to bytes
    in `dtype`.
    """
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None) or _PROMPT + 1
    prompt = max(1, min(_PROMPT, window - 1))  # within the window every layer caches every token
    kept = [layer for layer in _filled(model, prompt).layers if getattr(layer, "keys", None) is not None]
    values = sum(layer.keys.numel() + layer.values.numel() for layer in kept)  # linear attention has no keys
    return values / prompt * dtype_bytes(dtype)


def _filled(model: Any, tokens: int) -> Any:
    """The cache of so many tokens."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=input_device(model))
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).get(CACHE)
    if cache is None:
        raise Failure(
            f"{type(model).__name__} keeps no KV cache", hint="kvfold evaluates decoder-only models; is this an encoder?"
        )
    return cache


def cache_figures(
    model: Any, spec: AttentionSpec, dtype: str, source_bytes: int, form: str | None = None, context: int = _PROMPT
) -> dict[str, Any]:
    """The cost part of one report entry.

    Args:
        model: The model, loaded.
        spec: Its attention.
        dtype: The checkpoint's own dtype, in which a cache without a format is counted.
        source_bytes: The source's KV bytes per token.
        form: The format that the model stores its cache in; None for none.
        context: Tokens of the cache that is reported; where the newest keys are not encoded, bytes per token depend on it.

    Raises:
        Failure: Prediction and measurement differ, so neither can be reported.
    """
    if form is None:
        predicted, measured = float(spec.bytes_per_token(dtype)), measured_bytes_per_token(model, dtype)
    else:
        full = dtype_bytes(dtype)
        predicted = spec.cache_bytes(form, context, full) / context
        measured = sum(layer.stored_bytes(full) for layer in _filled(model, context).layers) / context
    if measured != predicted:
        raise Failure(
            f"the live cache of {type(model).__name__} holds {measured:g} bytes per token, its config predicts {predicted:g}",
            hint="this class caches something that kvfold does not know; please report the model type",
        )
    return {
        "cache_dtype": form or dtype,
        "cache_format": form,
        "kv_bytes_per_token": int(predicted) if predicted.is_integer() else predicted,
        "kv_bytes_measured": measured,
        "cache_ratio": predicted / source_bytes,
    }
