"""Grouped-query attention (GQA, MQA) that decodes over its cache as it lies, instead of repeating it for every query head.

With one new token, the query heads of a group are as good as several queries of their one KV head: packed as such, nothing has
to be repeated. transformers (5.23) packs them itself where there is a mask and nothing is compiled. Compiled with a mask, it
repeats keys and values to H heads at every step, which costs more than MHA does; without one it leaves the sharing to torch,
which on a CPU works as for H heads in bf16 (BENCHMARKS.md). On CUDA torch's flash attention splits the cache of a sequence
among processors, but takes no mask, and static caches and padding bring one: the kernel of `attention.kernels` does both.

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
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.errors import Refusal
from attention.kernels import Backend, decode_grouped, triton_decode

# What the attention functions are called, by backend.
NAMES: dict[Backend, str] = {"auto": "kvfold_auto", "triton": "kvfold_triton", "torch": "kvfold_torch"}
STOCK = "sdpa"
# What sdpa takes, or refuses, beside queries, keys, values and masks: it shall do so here as well.
_SPECIAL = ("cache", "position_bias", "softcap")


class PackedConfig:
    """The config of an attention module to everything but its lookup of an attention function, where "sdpa" is replaced.

    Another implementation that the model is switched to later is found as it is. Attributes that are set are set on the config.
    It is none of transformers' configs to `isinstance`.

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
        if name in ("stock", "backend"):
            raise AttributeError(f"{name} of a packed attention module is chosen by attention.pack(model)")
        setattr(self.stock, name, value)


def shares_heads(module: nn.Module) -> bool:
    """Whether query heads of `module` share KV heads, as transformers' own attention functions tell it."""
    groups = getattr(module, "num_key_value_groups", None)
    return isinstance(groups, int) and groups > 1


def is_packed(module: nn.Module) -> bool:
    """Whether `attention.patch.pack` has been at `module`."""
    return isinstance(getattr(module, "config", None), PackedConfig)


def objection(module: nn.Module) -> str | None:
    """Why `module`, which shares heads, cannot be packed, or None."""
    config = getattr(module, "config", None)
    chosen = getattr(config.stock if isinstance(config, PackedConfig) else config, "_attn_implementation", None)
    if chosen != STOCK:
        return f"it attends through {chosen!r}, and must through {STOCK!r}"
    if replaced := replaced_forward(module):
        return f"something else has replaced its forward by {replaced!r}"
    try:
        sources = {name: inspect.getsource(method) for name, method in _methods(type(module)).items()}
    except (OSError, TypeError):
        return "the source of its methods, which has to be looked at, is not to be had"
    if "ALL_ATTENTION_FUNCTIONS.get_interface(" not in sources["forward"]:
        return "its forward does not look an attention function up"
    # Some classes ask for "sdpa" by name, to build other masks for it: another name would change what they compute.
    if sum(source.count("_attn_implementation") for source in sources.values()) != 1:
        return "it does more with the name of its attention function than look it up"
    if "position_bias" in sources["forward"]:
        return "it adds biases of positions, which sdpa alone takes"
    return None


def replaced_forward(module: nn.Module) -> Any:
    """The forward that `module` has in place of its class's, below the hooks of accelerate, or None."""
    held = vars(module).get("_old_forward" if hasattr(module, "_old_forward") else "forward")
    return None if getattr(held, "__func__", None) is type(module).forward else held


def _methods(cls: type[nn.Module]) -> dict[str, Any]:
    """What `cls` has beyond `nn.Module`, but for its constructor, as it was before decorators."""
    own = {name: None for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module for name in vars(base)}
    found = {name: inspect.unwrap(getattr(cls, name)) for name in own if name != "__init__"}
    return {name: method for name, method in found.items() if inspect.isfunction(method)}


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
    heads, queries, dim = query.shape[1:]
    if queries == 1 and key.shape[1] < heads and kwargs.get("cache") is None:
        options = {"dropout": dropout or None} | {name: kwargs.get(name) for name in _SPECIAL}
        reason = _unlike(query, key, attention_mask, options)
        if reason is None and not (backend == "auto" and attention_mask is None and _flash(query, key, value)):
            scale = dim**-0.5 if scaling is None else scaling
            return decode_grouped(query, key, value, attention_mask, scale, backend).transpose(1, 2), None
        if reason and backend != "auto":
            raise Refusal(f"the {backend} backend cannot decode here: {reason}", 'leave the choice to backend="auto"')
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _unlike(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]) -> str | None:
    """Why `decode_grouped` is not made for a call, or None."""
    if named := [name for name, value in options.items() if value is not None]:
        return f"it knows no {' and no '.join(named)}"
    if query.shape[0] != key.shape[0]:
        return f"it takes as many queries as sequences, not {query.shape[0]} for {key.shape[0]}"
    if mask is not None and (mask.ndim != 4 or mask.shape[-1] != key.shape[2]):
        return f"it takes a mask over the {key.shape[2]} tokens of the cache, not one of shape {list(mask.shape)}"
    return None


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's flash attention serves a call without a mask: it packs groups itself, and splits the cache."""
    half = key.dtype in (torch.float16, torch.bfloat16)
    return triton_decode.on_gpu(key) and half and query.shape[-1] == value.shape[-1] <= 256


for _backend, _name in NAMES.items():
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(grouped_attention, backend=_backend))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, sdpa_mask)
