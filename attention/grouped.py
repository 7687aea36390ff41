"""Grouped-query attention (GQA, MQA) that decodes over its cache as it lies, instead of repeating it for every query head.

With one new token, the query heads of a group are as good as several queries of their one KV head: packed as such, nothing has
to be repeated. transformers (5.23) packs them itself where there is a mask and nothing is compiled. Compiled, it repeats keys
and values to H heads at every step, which costs more than MHA does; without a mask it leaves the sharing to torch, which on a
CPU works as for H heads (BENCHMARKS.md). On CUDA no attention of torch that takes a mask splits the cache of a sequence among
processors, and static caches and padded batches always have one: the kernel of `attention.kernels` does.

An attention function with the name of each backend is added to those of transformers, beside its own, which stay as they are;
`attention.patch.pack` switches one model to it. Letters as in `attention`; a value head has Dv.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.kernels import Backend, decode_grouped

# What the attention functions are called, by backend.
NAMES: dict[Backend, str] = {"auto": "kvfold_auto", "triton": "kvfold_triton", "torch": "kvfold_torch"}
STOCK = "sdpa"
# Arguments that change what sdpa computes, or that it refuses: it shall do so here as well.
_SPECIAL = ("cache", "position_bias", "softcap", "s_aux")


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    backend: Backend,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' "sdpa" computes: one query of several heads to a KV head by `decode_grouped`, all else by itself.

    Args:
        module: The attention module; sdpa looks at it.
        query: `[B, H, T, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, Dv]`.
        attention_mask: As `sdpa_mask` makes it: None, or bool `[B, 1, T, S]`; or of the same shape, added to the scores.
        dropout: A share of the weights.
        scaling: What scores are multiplied by; None for D^-½.
        backend: See `decode_grouped`.
        kwargs: Whatever the model hands to its attention function.

    Returns:
        `[B, T, H, Dv]`, and None in place of weights.

    Raises:
        Refusal: The backend, asked for by name, cannot serve.
    """
    special = any(kwargs.get(name) is not None for name in _SPECIAL)
    if dropout > 0 or special or not _packs(query, key, attention_mask, backend):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_grouped(query, key, value, attention_mask, scale, backend).transpose(1, 2), None


def _packs(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, backend: Backend) -> bool:
    heads, queries = query.shape[1:3]
    if queries != 1 or key.shape[1] == heads:
        return False
    if mask is None:
        # torch's flash attention packs groups itself on CUDA, and splits the cache; it takes no mask.
        return backend != "auto" or not key.is_cuda
    return mask.ndim == 4 and mask.shape[1] == 1


for _backend, _name in NAMES.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(grouped_attention, backend=_backend))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, sdpa_mask)
