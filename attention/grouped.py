"""Grouped-query attention (GQA, MQA) that decodes over its cache as it lies, instead of repeating it for every query head.

With one new token, the query heads of a group are as good as several queries of their one KV head: packed as such, nothing has
to be repeated. transformers (5.23) packs them itself where there is a mask and nothing is compiled. Compiled with a mask, it
repeats keys and values to H heads at every step, which costs more than MHA does; without one it leaves the sharing to torch,
which on a CPU works as for H heads in bf16 (BENCHMARKS.md). On CUDA no attention of torch that takes a mask splits the cache of
a sequence among processors, and static caches and padded batches always have one: the kernel of `attention.kernels` does.

An attention function with the name of each backend is added to those of transformers, beside its own, which stay as they are.
`attention.patch.pack` has the attention modules of one model look there: it puts `PackedConfig` before their config. Whatever
else reads the config (masks, caches, generation, `save_pretrained`) finds "sdpa". Letters as in `attention`; values have Dv.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.kernels import Backend, decode_grouped, triton_decode

# What the attention functions are called, by backend.
NAMES: dict[Backend, str] = {"auto": "kvfold_auto", "triton": "kvfold_triton", "torch": "kvfold_torch"}
STOCK = "sdpa"
# Arguments that change what sdpa computes, or that it refuses: it shall do so here as well.
_SPECIAL = ("cache", "position_bias", "softcap", "s_aux")


class PackedConfig:
    """The config of an attention module to everything but its lookup of an attention function, where "sdpa" is replaced.

    Another implementation that the model is switched to later is found as it is.

    Attributes:
        stock: The config.
        backend: See `attention.kernels.decode_grouped`.
    """

    stock: Any
    backend: Backend

    def __init__(self, stock: Any, backend: Backend) -> None:
        vars(self).update(stock=stock, backend=backend)

    @property
    def _attn_implementation(self) -> str:
        chosen: str = self.stock._attn_implementation
        return NAMES[self.backend] if chosen == STOCK else chosen

    def __getattr__(self, name: str) -> Any:
        if name in ("stock", "backend") or name.startswith("__"):  # asked for while it is being copied
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.stock, name, value)


def shares_heads(module: nn.Module) -> bool:
    """Whether query heads of `module` share KV heads, as transformers' own attention functions tell it."""
    return getattr(module, "num_key_value_groups", 1) > 1


def is_packed(module: nn.Module) -> bool:
    """Whether `attention.patch.pack` has been at `module`."""
    return isinstance(getattr(module, "config", None), PackedConfig)


def objection(module: nn.Module) -> str | None:
    """Why `module`, which shares heads, cannot be packed, or None."""
    config = getattr(module, "config", None)
    chosen = getattr(config.stock if isinstance(config, PackedConfig) else config, "_attn_implementation", None)
    if chosen != STOCK:
        return f"it attends through {chosen!r}, and must through {STOCK!r}"
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return "the source of its forward, which has to be looked at, is not to be had"
    # Some classes ask for "sdpa" by name, to build other masks for it: another name would change what they compute.
    uses = source.count("_attn_implementation")
    if "ALL_ATTENTION_FUNCTIONS.get_interface(" not in source or uses != 1:
        return "its forward does more with the name of its attention function than look it up"
    return None


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

    All else is several queries, dropout, a paged cache, biases of positions, and whatever sdpa refuses.

    Args:
        module: The attention module; sdpa looks at it.
        query: `[B, H, T, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, Dv]`.
        attention_mask: None, or `[B or 1, 1 or H, T, S]`: true where a token is seen, or a number added to the scores.
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
    if dropout > 0 or special or not _packs(query, key, value, attention_mask, backend):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_grouped(query, key, value, attention_mask, scale, backend).transpose(1, 2), None


def _packs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, backend: Backend) -> bool:
    batch, heads, queries, dim = query.shape
    if queries != 1 or key.shape[1] == heads or key.shape[0] != batch:
        return False
    if mask is not None or backend != "auto" or not triton_decode.on_gpu(key):
        return mask is None or mask.ndim == 4
    # torch's flash attention, which takes no mask, packs groups itself and splits the cache; elsewhere heads are repeated.
    return key.dtype not in (torch.float16, torch.bfloat16) or not dim == value.shape[-1] <= 256


for _backend, _name in NAMES.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(grouped_attention, backend=_backend))
