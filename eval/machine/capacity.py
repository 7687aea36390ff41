"""Compares KV memory and weights of each attention kind, from a config alone, with the memory of GPUs.

A gigabyte is 10⁹ bytes throughout, as on the box of a GPU. It reads no weights: it counts parameters on the meta device.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from typing import Any

from attention.auto import from_config
from attention.errors import Refusal
from attention.spec import AttentionSpec, dtype_bytes

GPUS: dict[str, float] = {"RTX 4090": 24, "RTX 5090": 32, "A100/A800/H800": 80, "H20": 96, "H200": 141}
GIGABYTE = 10**9
GPU_SHARE = 0.9  # of its memory for weights and cache; the rest is for activations and the CUDA context
_LONGEST = 2**40  # tokens: a cache of which windows bound every layer fits at any length


def without_weights(config: Any) -> Any:
    """The causal LM that `config` describes, on the meta device, without allocating memory.

    Raises:
        Refusal: transformers cannot build a model from `config`.
    """
    import torch

    try:
        # accelerate's `init_empty_weights` allocates each tensor before it moves it: a large one may not fit.
        with torch.device("meta"):
            model = from_config(config)
    except Exception as error:  # classes raise errors of many kinds on settings that they do not know
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise Refusal(f"transformers cannot build a model from this config of type {config.model_type!r}: {reason}") from error
    model.tie_weights()
    return model


def count_parameters(config: Any) -> int:
    """Count the parameters of the causal LM that `config` describes, tied ones once, without allocating memory.

    Raises:
        Refusal: transformers cannot build a model from `config`.
    """
    return sum(parameter.numel() for parameter in without_weights(config).parameters())


def fit(
    spec: AttentionSpec,
    parameters: int,
    dtype: str,
    batch: int,
    context: int,
    gpus: Mapping[str, float],
    cache_dtype: str | None = None,
    share: float = GPU_SHARE,
) -> dict[str, Any]:
    """The memory of one attention kind of one model, and the GPUs that it fits on.

    Args:
        spec: Its sizes.
        parameters: Parameters of the whole model with it.
        dtype: Dtype of weights.
        batch: Sequences at once.
        context: Tokens per sequence.
        gpus: Gigabytes by name.
        cache_dtype: The format of the cache, see `attention.formats`; None for `dtype`.
        share: The share of a GPU's memory for weights and cache.

    Returns:
        "kind": "MHA", "GQA-8", …; bytes of KV cache, of all layers, at this context: "kv_bytes_per_token" of each sequence, and
        "kv_bytes"; "weight_bytes" of all parameters; and per GPU "longest_context", the most tokens per sequence that fit
        beside the weights at this batch, 0 if those do not fit, and whether this context "fits".
    """
    form, weights = cache_dtype or dtype, parameters * dtype_bytes(dtype)
    room = {name: (share * size * GIGABYTE - weights) / batch for name, size in gpus.items()}
    of_tokens = partial(spec.cache_bytes, form)
    longest = {name: max(0, bisect_right(range(_LONGEST), free, key=of_tokens) - 1) for name, free in room.items()}
    return {
        "kind": spec.kind,
        "kv_bytes_per_token": spec.bytes_per_token(form, context),
        "kv_bytes": spec.cache_bytes(form, context) * batch,
        "weight_bytes": weights,
        "longest_context": longest,
        "fits": {name: tokens >= context for name, tokens in longest.items()},
    }
