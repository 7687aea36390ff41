"""The size of a model's KV cache: predicted by the one formula, and measured on a live cache object."""

from __future__ import annotations

from typing import Any

import torch

from attention.errors import Failure
from attention.formats import KIVI
from attention.spec import AttentionSpec, dtype_bytes
from attention.versions import CACHE, logits_of
from eval.machine.device import input_device

_PROMPT = 16


def measured_bytes_per_token(model: Any, dtype: str, context: int = _PROMPT) -> float:
    """Bytes per token of the cache that `model` fills over so many tokens, converted to storage in `dtype`.

    The model may run in another dtype than its checkpoint's (fp32 on a CPU): values are counted, and converted to bytes
    in `dtype`.
    """
    kept = [layer for layer in _filled(model, context).layers if getattr(layer, "keys", None) is not None]
    values = sum(layer.keys.numel() + layer.values.numel() for layer in kept)  # linear attention has no keys
    return values * dtype_bytes(dtype) / context


def _filled(model: Any, tokens: int) -> Any:
    ids = torch.zeros(1, tokens, dtype=torch.long, device=input_device(model))
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True, **logits_of(model, 1)).get(CACHE)
    if cache is None:
        raise Failure(
            f"{type(model).__name__} keeps no KV cache", hint="kvfold evaluates decoder-only models; is this an encoder?"
        )
    return cache


def cache_figures(
    model: Any, spec: AttentionSpec, dtype: str, source_bytes: float, form: str | None = None, context: int = _PROMPT
) -> dict[str, Any]:
    """The cost part of one report entry.

    Args:
        model: The model, loaded.
        spec: Its attention.
        dtype: The checkpoint's own dtype, in which a cache without a format is counted.
        source_bytes: The source's KV bytes per token, at this context.
        form: The format that the model stores its cache in, or only rounds to; None for none.
        context: Tokens of the cache that is reported; with windows, bytes per token depend on it.

    Returns:
        `{"cache_dtype", "cache_format", "kv_bytes_per_token", "kv_bytes_measured", "cache_ratio"}`, and "kv_context" where
        windows are shorter than it. "kv_bytes_measured" is None for a format that only rounds.

    Raises:
        Failure: Prediction and measurement differ, so neither can be reported.
    """
    cut = spec.is_cut(context)
    predicted = spec.bytes_per_token(form or dtype, context if cut or form else None)
    if form in KIVI:
        measured = None
    elif form is None:
        measured = measured_bytes_per_token(model, dtype, context if cut else min(context, _PROMPT))
    else:
        measured = sum(layer.nbytes for layer in _filled(model, context).layers) / context
    if measured is not None and measured != predicted:
        raise Failure(
            f"the live cache of {type(model).__name__} holds {measured:g} bytes per token, its config predicts {predicted:g}",
            hint="this class caches something that kvfold does not know; please report the model type",
        )
    return {
        "cache_dtype": form or dtype,
        "cache_format": form,
        "kv_bytes_per_token": int(predicted) if predicted == int(predicted) else predicted,
        "kv_bytes_measured": measured,
        "cache_ratio": predicted / source_bytes,
        **({"kv_context": context} if cut else {}),
    }
