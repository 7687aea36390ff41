"""Grouped-query attention (GQA, MQA) that decodes directly over its cache instead of repeating it for every query head.

With one new token, the query heads of a group can be packed as several queries of their one KV head, and nothing has
to be repeated. transformers (5.23) does so itself if there is a mask and nothing is compiled. Compiled with a mask, it
repeats keys and values to H heads at every step, which costs more than MHA; without a mask it leaves the sharing to torch,
which in bf16 on a CPU costs as much as H KV heads (BENCHMARKS.md). On CUDA torch's flash attention splits a sequence's cache
among processors, but takes no mask, and static caches and padding need one: the kernel of `attention.kernels` does both.

This module registers its attention function with transformers, whose own functions stay as they are.
`attention.patch.pack` makes the attention modules of one model use it: it puts `PackedConfig` before their config. Whatever
else reads the config (masks, caches, generation, `save_pretrained`) finds "sdpa". Letters as in `attention`; values have Dv.
"""

import inspect
from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.cache import Stored
from attention.errors import Refusal
from attention.kernels import Backend, decode_grouped, triton_decode

NAME, STOCK = "kvfold_grouped", "sdpa"  # of attention functions


class PackedConfig:
    """A proxy for the config of an attention module; only the name of the attention function differs where it is "sdpa".

    If the model is switched to another implementation later, that one is used. Setting an attribute sets it on the config.
    `isinstance` does not take it for a config of transformers.

    Attributes:
        stock: The config.
        backend: See `attention.kernels.decode_grouped`.
    """

    stock: Any
    backend: Backend
    _by = "pack"

    def __init__(self, stock: Any, backend: Backend, **more: Any) -> None:
        vars(self).update(stock=stock, backend=backend, **more)

    @property
    def _attn_implementation(self) -> str:
        chosen: str = self.stock._attn_implementation
        return NAME if chosen == STOCK else chosen

    def __getattr__(self, name: str) -> Any:
        if "stock" not in vars(self) or name.startswith("__"):  # looked up during a copy
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise AttributeError(f"{name} of a {self._by}ed attention module is chosen by attention.{self._by}(model)")
        setattr(self.stock, name, value)


def shares_heads(module: nn.Module) -> bool:
    """Whether query heads of `module` share KV heads, by the attribute that transformers' attention functions read."""
    groups = getattr(module, "num_key_value_groups", None)
    return isinstance(groups, int) and groups > 1


def is_packed(module: nn.Module) -> bool:
    """Whether `module` is packed (`attention.patch.pack`)."""
    return type(getattr(module, "config", None)) is PackedConfig


def objection(module: nn.Module) -> str | None:
    """Why `module`, which shares heads, cannot be packed, or None."""
    config = getattr(module, "config", None)
    chosen = getattr(config.stock if isinstance(config, PackedConfig) else config, "_attn_implementation", None)
    if chosen != STOCK:
        return f"it attends through {chosen!r}, and must attend through {STOCK!r}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it caps its logits, which sdpa does not"
    if replaced := replaced_forward(module):
        return f"something else has replaced its forward by {replaced!r}"
    try:
        sources = {name: inspect.getsource(method) for name, method in _methods(type(module)).items()}
    except (OSError, TypeError):
        return "the source of its methods, which has to be checked, cannot be read"
    if "ALL_ATTENTION_FUNCTIONS.get_interface(" not in sources["forward"]:
        return "its forward does not look an attention function up"
    # Some classes compare the name with "sdpa" to build other masks for it: another name would change their results.
    if sum(source.count("_attn_implementation") for source in sources.values()) != 1:
        return "it does more with the name of its attention function than look it up"
    if "s_aux" in sources["forward"]:
        return "its heads have sinks, which sdpa leaves out"
    if "position_bias" in sources["forward"]:
        return "it adds biases of positions, which sdpa alone takes"
    return None


def replaced_forward(module: nn.Module) -> Any:
    """The forward that replaces that of `module`'s class, beneath accelerate's hooks; None if it is the class's own."""
    held = vars(module).get("_old_forward" if hasattr(module, "_old_forward") else "forward")
    return None if getattr(held, "__func__", None) is type(module).forward else held


def _methods(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of `cls` beyond those of `nn.Module`, without its constructor and without decorators."""
    own = {name: None for base in cls.__mro__ if issubclass(base, nn.Module) and base is not nn.Module for name in vars(base)}
    found = {name: inspect.unwrap(getattr(cls, name)) for name in own if name != "__init__"}
    return {name: method for name, method in found.items() if inspect.isfunction(method)}


def grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The same as transformers' "sdpa": `decode_grouped` does one query per head with shared KV heads, sdpa does the rest.

    The rest is several queries, dropout, a paged cache, position biases, and whatever sdpa refuses.

    Args:
        module: The attention module, whose config names the backend (`PackedConfig`).
        query: `[B, H, T, D]`.
        key: `[B, G, S, D]`.
        value: `[B, G, S, Dv]`.
        attention_mask: None, or `[B or 1, 1 or H, T, S]`: true where a token is seen, or a number added to the scores.
        dropout: The chance that a probability of the attention is dropped.
        scaling: The factor of the scores; None for D^-½.
        kwargs: Everything else that the model passes to its attention function.

    Returns:
        `[B, T, H, Dv]`, and None in place of probabilities.

    Raises:
        Refusal: A backend other than "auto" cannot serve this call.
    """
    for name in ("softcap", "s_aux"):  # caps, and sinks of heads: sdpa leaves the latter out without an error, before 5.23 both
        if kwargs.get(name) is not None:
            raise Refusal(f"sdpa does not support `{name}`", 'load the model with attn_implementation="eager"')
    (heads, queries, dim), backend = query.shape[1:], module.config.backend
    if queries == 1 and key.shape[1] < heads and kwargs.get("cache") is None:
        reason = _unlike(query, key, attention_mask, dropout=dropout or None, position_bias=kwargs.get("position_bias"))
        # Without a mask, torch's flash attention packs groups itself and splits the cache.
        half = key.dtype in (torch.float16, torch.bfloat16) and not isinstance(key, Stored)
        flash = half and triton_decode.on_gpu(key) and dim == value.shape[-1] <= 256
        if reason is None and not (backend == "auto" and attention_mask is None and flash):
            scale = dim**-0.5 if scaling is None else scaling
            return decode_grouped(query, key, value, attention_mask, scale, backend).transpose(1, 2), None
        if reason and backend != "auto":
            raise Refusal(f"the {backend} backend cannot decode here: {reason}", 'leave the choice to backend="auto"')
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _unlike(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, **others: Any) -> str | None:
    """Why `decode_grouped` cannot serve a call, or None. `others`: arguments that sdpa handles, or None."""
    if named := [name for name, value in others.items() if value is not None]:
        return f"it does not support {' and '.join(named)}"
    if query.shape[0] != key.shape[0]:
        return f"it takes one query per sequence, not {query.shape[0]} for {key.shape[0]}"
    if mask is not None and (mask.ndim != 4 or mask.shape[-1] != key.shape[2]):
        return f"it takes a mask over the {key.shape[2]} tokens of the cache, not one of shape {list(mask.shape)}"
    return None


ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
