"""Let one model object decode over its cache as it lies, and make it stock again.

Only the attention modules of the model at hand change: where latent attention is absorbed their class, where grouped attention
is packed what they find in their config. Weights, names, the model's config, cache, transformers' own attention functions and
every other model stay as they are. `save_pretrained` writes what it would have written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.youtu.modeling_youtu import YoutuAttention

from attention.errors import Failure, Refusal
from attention.grouped import PackedConfig, is_packed, objection, replaced_forward, shares_heads
from attention.kernels import Backend, check
from attention.latent import RULES, LatentAttention, When


def _before(stock: type[nn.Module]) -> type[nn.Module]:
    return type(f"Latent{stock.__name__}", (LatentAttention, stock), {"__module__": __name__})


# Bound to their names so that they can be pickled.
LatentDeepseekV3Attention = _before(DeepseekV3Attention)
LatentYoutuAttention = _before(YoutuAttention)

# The stock classes whose forward `LatentAttention` repeats (they differ in name only), and what they become.
LATENT: dict[type[nn.Module], type[nn.Module]] = {
    DeepseekV3Attention: LatentDeepseekV3Attention,
    YoutuAttention: LatentYoutuAttention,
}
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(path: str | Path, *, when: When = "auto", backend: Backend = "auto", **arguments: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(path, **arguments)`, and what serves its cache best.

    Latent attention is absorbed, with `when` and `backend` as in `absorb`; grouped attention is packed where `pack` can, with
    `backend`; MHA, and what was asked to attend through something else, stays as it is.

    Raises:
        Refusal, Failure: As `absorb`.
    """
    _rule(when)
    check(backend)
    model = AutoModelForCausalLM.from_pretrained(path, **arguments)
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        return absorb(model, when=when, backend=backend)
    return pack(model, backend=backend) if _packable(model) else model


def absorb(model: Any, *, when: When = "auto", backend: Backend = "auto") -> Any:
    """Let `model` decode over its cached latent.

    Doing it again changes `when` and `backend`, and looks anew at whether the latent norm is neutral: do so after loading
    other weights.

    Args:
        model: A transformers model with stock MLA attention (a class of `LATENT`), its weights in memory and not quantised.
        when: "auto" (where it is cheaper, `attention.latent.absorbs`), "always" (as far as the mask allows, see
            `LatentAttention`), "never" (still skips a neutral norm), or a function of the signature of `absorbs`.
        backend: What attends to the latent for one new token: "auto" (the fastest that can), "triton" or "torch". A
            backend asked for by name refuses in the forward pass what it cannot serve. Several tokens at once are always
            torch's, and so are the probabilities of eager attention.

    Returns:
        `model` itself.

    Raises:
        Refusal: There is no stock MLA attention, or it has been changed in ways that absorption would pass over.
        Failure: Weights are not in memory.
    """
    rule = _rule(when)
    check(backend)
    modules = _attention(model)
    if not modules:
        known = " or ".join(stock.__name__ for stock in LATENT)
        raise Refusal(
            f"{type(model).__name__} has no latent attention that can be absorbed: none of its modules is a {known}",
            "convert it with `convert mla`, or run it as it is",
        )
    for name, module in modules.items():
        if not isinstance(module, LatentAttention):
            _check(name, module)
    for module in modules.values():
        if type(module) in LATENT:
            _become(module, LATENT[type(module)])
        cast(LatentAttention, module).prepare(rule, backend)
    return model


def pack(model: Any, *, backend: Backend = "auto") -> Any:
    """Let `model` decode over the cached keys and values that its query heads share, without repeating them.

    Args:
        model: A transformers model whose query heads share KV heads (GQA, MQA) and attend through "sdpa", in all its parts or
            some: others stay as they are.
        backend: As for `absorb`. Several tokens at once, the paged cache of continuous batching, and under "auto" also what
            flash attention takes on CUDA (a token without a mask) and what `grouped_attention` says, are left to sdpa.

    Returns:
        `model` itself.

    Raises:
        Refusal: It shares no KV heads, or none of the modules that do can be packed.
    """
    check(backend)
    kind = type(model).__name__
    shared = {name: module for name, module in model.named_modules() if shares_heads(module)}
    if not shared:
        raise Refusal(
            f"{kind} has no attention that declares shared KV heads (num_key_value_groups), which could be packed",
            "run it as it is; `convert gqa` makes models with MHA share KV heads",
        )
    modules = _packable(model)
    if not modules:
        name, module = next(iter(shared.items()))
        raise Refusal(
            f"cannot pack {name} of {kind}: {objection(module)}", 'load it with attn_implementation="sdpa", or run it as it is'
        )
    for module in modules:
        module.config = PackedConfig(_stock_config(module), backend)
    return model


def restore(model: Any) -> Any:
    """Make `model` stock again; one that was neither absorbed nor packed stays as it is.

    Returns:
        `model` itself.
    """
    for module in _attention(model).values():
        if isinstance(module, LatentAttention):
            module.unprepare()
            _become(module, type(module).__bases__[1])
    for module in model.modules():
        if is_packed(module):
            module.config = _stock_config(module)
    return model


@contextmanager
def absorbed(model: Any, *, when: When = "auto", backend: Backend = "auto") -> Iterator[Any]:
    """`model` is absorbed inside the `with` block, and as it was before after it, also after an exception.

    Raises:
        Refusal, Failure: As `absorb`.
    """
    before = next(((m.rule, m.backend) for m in _attention(model).values() if isinstance(m, LatentAttention)), None)
    try:
        yield absorb(model, when=when, backend=backend)
    finally:
        if before is None:
            restore(model)
        else:
            absorb(model, when=before[0], backend=before[1])


def _rule(when: When) -> Any:
    if callable(when):
        return when
    if when not in RULES:
        raise Refusal(f"cannot absorb when={when!r}: it must be a function or one of {', '.join(map(repr, RULES))}")
    return RULES[when]


def _attention(model: nn.Module) -> dict[str, nn.Module]:
    """Stock MLA modules by name, absorbed already or not; a subclass with a forward of its own is not one."""
    classes = {*LATENT, *LATENT.values()}
    return {name: module for name, module in model.named_modules() if type(module) in classes}


def _packable(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if shares_heads(module) and objection(module) is None]


def _stock_config(module: Any) -> Any:
    return module.config.stock if is_packed(module) else module.config


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of `module`, and the methods of the old one that accelerate's hooks hold on to."""
    old = type(module).forward
    module.__class__ = cls
    for name in ("forward", "_old_forward"):
        held = vars(module).get(name)
        if isinstance(held, MethodType) and held.__func__ is old:
            setattr(module, name, MethodType(cls.forward, module))


def _check(name: str, module: nn.Module) -> None:
    """Whether absorption may read the weights of `module` and replace its forward."""
    linear: Any = module.kv_b_proj
    if any(tensor.is_meta for tensor in module.parameters()):
        raise Failure(
            f"cannot absorb {name}: some of its weights are on the meta device, and must be in memory",
            "load the model without offloading",
        )
    weight = getattr(linear, "weight", None)
    # A subclass of either (quantised, with adapters, sharded) computes something else than x Wᵀ with the values seen here.
    if type(linear) is not nn.Linear or type(weight) is not nn.Parameter or weight.dtype not in _PLAIN:
        kind = f"{type(linear).__name__} with {getattr(weight, 'dtype', 'no')} weights of type {type(weight).__name__}"
        raise Refusal(
            f"cannot absorb {name}.kv_b_proj: it is a {kind}, and must be a plain Linear with floating weights",
            "leave kv_b_proj out of quantisation (modules_to_not_convert), or merge the adapters",
        )
    if getattr(linear, "bias", None) is not None:
        raise Refusal(f"cannot absorb {name}.kv_b_proj: it has a bias, and must have none")
    if held := replaced_forward(module):
        raise Refusal(
            f"cannot absorb {name}: something else has replaced its forward by {held!r}",
            "undo that first",
        )
