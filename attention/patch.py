"""Make one model object decode directly over its cache, and undo that.

Only the attention modules of that model change: the config that they see, and with a latent, whether they expand it. Classes,
weights, names, the model's config, cache, transformers' own attention functions and all other models stay as they are.
`save_pretrained` writes the same files.
"""

import logging
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention
from transformers.models.youtu.modeling_youtu import YoutuAttention

from attention.auto import auto_class, refuse_adapter
from attention.calibrated import Calibrated
from attention.encoded_forward import store_encoded, store_plain
from attention.errors import Failure, Refusal
from attention.formats import stored_format
from attention.grouped import STOCK as SDPA
from attention.grouped import PackedConfig, is_packed, objection, replaced_forward, shares_heads
from attention.kernels import Backend, check
from attention.latent import AbsorbedConfig, When, is_absorbed, kept_latent
from attention.models import register, unlike_ours
from attention.models.modeling_kvfold import KvfoldLatentAttention, require_decoding
from attention.versions import keep_caps

_log = logging.getLogger("kvfold")


# The stock classes whose latents `attention.latent.latent_attention` takes.
STOCK: tuple[Any, ...] = (DeepseekV3Attention, YoutuAttention, MiniCPM3Attention)
# Arguments of `from_pretrained` that say which files are read.
_OF_HUB = {
    "trust_remote_code", "revision", "code_revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download",
    "proxies",
}  # fmt: skip
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load(
    path: str | Path, *, when: When = "auto", backend: Backend = "auto", cache_dtype: str | None = None, **arguments: Any
) -> Any:
    """`from_pretrained(path, **arguments)` of the class that `attention.auto` names, absorbed or packed where possible.

    Latent attention is absorbed, with `when` and `backend` as in `absorb`; grouped attention is packed where `pack` can, with
    `backend`. MHA, and a model that was loaded with another attention implementation, stay as they are. With `cache_dtype`, the
    model stores its cache in that format, see `attention.cache`. A warning says so where a model is calibrated for fewer
    positions than its source has (`attention.calibrated`).

    Raises:
        Refusal, Failure: As `absorb`, `attention.auto.refuse_adapter` or `attention.encoded_forward.store_encoded`.
    """
    register()
    _check_when(when)
    check(backend)
    form = None if cache_dtype is None else stored_format(cache_dtype)
    refuse_adapter(Path(path), path)
    if said := unlike_ours(Path(path)):
        _log.warning(said)
    config = arguments.get("config")
    if config is None or isinstance(config, str | Path):
        config = AutoConfig.from_pretrained(config or path, **{name: arguments[name] for name in _OF_HUB & arguments.keys()})
    if limited := Calibrated.of_config(config):
        _log.warning("%s is %s", path, limited)
    made = auto_class(config).from_pretrained(path, **arguments)
    model = prepared(keep_caps(made), when=when, backend=backend)
    try:
        require_decoding(model, _tried(model))
    except (RuntimeError, TypeError) as error:
        raise Failure(str(error)) from error
    return model if form is None else store_encoded(model, form.name)


def _tried(model: Any) -> list[nn.Module]:
    """List the absorbed or packed attention modules. A model with other layers that mix tokens (Mamba) has none to try."""
    latent = list(_attention(model).values())
    packed = [module for module in model.modules() if is_packed(module) and hasattr(module, "layer_idx")]
    config = model.config.get_text_config(decoder=True)
    every = len(packed) == config.num_hidden_layers or getattr(model.config, "kept_layers", None)
    return latent or (packed if every else [])


def prepared(model: Any, *, when: When = "auto", backend: Backend = "auto") -> Any:
    """`model` itself, absorbed or packed where possible, as `load` does."""
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        model = absorb(model, when=when, backend=backend)
    return pack(model, backend=backend) if _packable(model) else model


def absorb(model: Any, *, when: When = "auto", backend: Backend = "auto") -> Any:
    """Make `model` decode directly over its cached latent.

    A second call changes `when` and `backend`.

    Args:
        model: A transformers model with MLA of a class in `STOCK` or of kvfold's own; its weights are in memory and not
            quantised.
        when: Whether to absorb: "auto" (if cheaper, see `attention.latent.absorbs`), or "always" (if the mask allows it).
        backend: What serves one new token: "auto" (the fastest that can), "triton" or "torch". A
            backend given by name raises `Refusal` in the forward pass if it cannot serve a call. Torch always serves several
            tokens at once, and the probabilities of eager attention.

    Returns:
        `model` itself.

    Raises:
        Refusal: No module has a latent attention that can be absorbed, or one has changes that absorption would ignore.
        Failure: Some weights are not in memory.
    """
    _check_when(when)
    check(backend)
    modules = _attention(model)
    if not modules:
        known = ", ".join([*(stock.__name__ for stock in STOCK), f"or {KvfoldLatentAttention.__name__}"])
        raise Refusal(
            f"{type(model).__name__} has no latent attention that can be absorbed: none of its modules is a {known}",
            "load a kvfold checkpoint by attention.load; convert others with `convert mla`, or run them as they are",
        )
    for name, module in modules.items():
        if not is_absorbed(module) or module.config.when == "never":
            _check(name, module)
    for module in modules.values():
        module.config, module.expand_kv = AbsorbedConfig(_stock_config(module), backend, when=when), kept_latent
    return model


def pad_values(model: Any) -> Any:
    """Let latent attention that uses "sdpa" have values as wide as its keys wherever it runs on a CPU.

    There torch has no other kernel that avoids the `[B, H, T, S]` probabilities. Padded with zeros, values give the same
    output, 5 to 8 times faster at 512 tokens. Other models stay as they are.

    Returns:
        `model` itself.
    """
    for module in _attention(model).values():
        if module.config._attn_implementation == SDPA:
            module.config, module.expand_kv = AbsorbedConfig(module.config, "torch", when="never"), kept_latent
    return model


def pack(model: Any, *, backend: Backend = "auto") -> Any:
    """Make `model` decode over the cached keys and values that its query heads share, without repeating them.

    Args:
        model: A transformers model whose query heads share KV heads (GQA, MQA) and attend through "sdpa", in all modules or
            some; other modules stay as they are.
        backend: As for `absorb`. sdpa keeps several tokens at once, the paged cache of continuous batching, with "auto"
            what flash attention takes on CUDA (one token, no mask), and the other calls that `grouped_attention` names.

    Returns:
        `model` itself.

    Raises:
        Refusal: No module shares KV heads, or none that does can be packed.
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
    """Undo `absorb`, `pack` and `cache_dtype` of `load`; a model without them stays as it is.

    Returns:
        `model` itself.
    """
    store_plain(model)
    for module in model.modules():
        if is_absorbed(module):
            del module.expand_kv
        if is_absorbed(module) or is_packed(module):
            module.config = _stock_config(module)
    return model


def _check_when(when: str) -> None:
    if when not in get_args(When):
        raise Refusal(f"cannot absorb when={when!r}: it must be one of {', '.join(map(repr, get_args(When)))}")


def _attention(model: nn.Module) -> dict[str, Any]:
    """The modules with MLA that is absorbed or can be, by name; subclasses that override `forward` are excluded."""
    return {name: module for name, module in model.named_modules() if type(module) in STOCK or _is_own(module)}


def _is_own(module: nn.Module) -> bool:
    return isinstance(module, KvfoldLatentAttention) and type(module).forward is KvfoldLatentAttention.forward


def _packable(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if shares_heads(module) and objection(module) is None]


def _stock_config(module: Any) -> Any:
    return module.config.stock if is_absorbed(module) or is_packed(module) else module.config


def _check(name: str, module: nn.Module) -> None:
    """Check that absorption may read the weights of `module` and replace its forward."""
    linear: Any = module.kv_b_proj
    if any(tensor.is_meta for tensor in module.parameters()):
        raise Failure(
            f"cannot absorb {name}: some of its weights are on the meta device, and must be in memory",
            "load the model without offloading",
        )
    weight = getattr(linear, "weight", None)
    # Subclasses of either (quantised, with adapters, sharded) do not compute x Wᵀ with the values in `weight`.
    if type(linear) is not nn.Linear or type(weight) is not nn.Parameter or weight.dtype not in _PLAIN:
        kind = f"{type(linear).__name__} with {getattr(weight, 'dtype', 'no')} weights of type {type(weight).__name__}"
        raise Refusal(
            f"cannot absorb {name}.kv_b_proj: it is a {kind}, and must be a plain Linear with floating weights",
            "leave kv_b_proj out of quantisation (modules_to_not_convert), or merge the adapters",
        )
    if getattr(linear, "bias", None) is not None:
        raise Refusal(f"cannot absorb {name}.kv_b_proj: it has a bias, and must have none")
    if held := replaced_forward(module):
        raise Refusal(f"cannot absorb {name}: something else has replaced its forward by {held!r}", "undo that first")
