"""Multi-head latent attention (MLA) that decodes directly over the cached latent instead of expanding it.

transformers caches the latent of each token, c [R], and its rotary key [P], but at every step expands the whole cache to keys
and values of H heads. The expansion is linear, so queries and outputs can absorb it (DeepSeek-V2, arXiv 2405.04434, 2.1.2):

    scores  = q_nopeᵀ (W_UK c) + q_ropeᵀ k_rope = (W_UKᵀ q_nope)ᵀ c + q_ropeᵀ k_rope
    outputs = Σ p (W_UV c)                      = W_UV (Σ p c)

One latent then serves all heads: a step reads S (R + P) values instead of making S · H · (N + Dv).

The attention of stock classes and of kvfold's own asks `expand_kv` for keys and values, then calls the attention function of
its config. `attention.patch.absorb` puts `kept_latent` and `AbsorbedConfig` in their places: the class itself does all else,
and `latent_attention` chooses between its arithmetic (the prefill) and the absorbed one (decoding).
Letters as in `attention`; a query head has N nope dims and P rope dims, a value head has Dv.
"""

import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention.cache import Stored
from attention.errors import Refusal
from attention.forward import widened
from attention.grouped import STOCK, PackedConfig, replaced_forward
from attention.kernels import decode, torch_decode
from attention.models.modeling_kvfold import eager

When = Literal["auto", "always"]

# Arguments of attention functions with a paged cache (continuous batching); up to transformers 5.23, the cache itself.
_OF_PAGES = ("cache", "read_index", "block_table")

# The cost of a multiply-add of the absorbed path relative to the expanded path, which also writes and reads the keys and
# values it makes. benchmarks/decode.py (fp32, 2 CPU threads, 16 heads, R 256, P 32, N = Dv = 64) found both paths equally fast
# at about 100 queries over 1k tokens, 140 over 4k and 135 over 16k, where this constant is 0.85, 0.71 and 0.73.
ABSORBED_COST = 0.8


def absorbs(queries: int, cached: int, rank: int, nope: int, rope: int, value: int) -> bool:
    """Whether T = `queries` new tokens over S = `cached` tokens (the new ones included) are cheaper absorbed than expanded.

    Counts multiply-adds of one head: the expansion does S·R·(N + Dv) before its attention of T·S·(N + P + Dv); absorbed,
    queries and outputs cost T·R·(N + Dv), and the attention is wider, T·S·(2R + P). Both grow with the batch alike.
    """
    expanded = cached * rank * (nope + value) + queries * cached * (nope + rope + value)
    absorbed = queries * rank * (nope + value) + queries * cached * (2 * rank + rope)
    return absorbed * ABSORBED_COST < expanded


class AbsorbedConfig(PackedConfig):
    """The same proxy for a module with a latent, whose attention function is always `latent_attention`.

    Attributes:
        when: As of `attention.patch.absorb`; or "never", where values are only padded.
    """

    when: When | Literal["never"]
    _by = "absorb"

    @property
    def _attn_implementation(self) -> str:
        # The class finds in it what it looks for in the name: whether it pages, or is flash attention.
        name = f"kvfold_latent|{self.stock._attn_implementation}"
        if name not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(name, latent_attention)
        return name


class _AsStock:
    """An absorbed module with its stock config, for attention functions; for other threads, the module stays absorbed."""

    def __init__(self, module: Any) -> None:
        vars(self).update(_module=module, config=module.config.stock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def is_absorbed(module: nn.Module) -> bool:
    """Whether `module` attends through `latent_attention`."""
    return isinstance(getattr(module, "config", None), AbsorbedConfig)


def kept_latent(latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of `expand_kv`: both as they are."""
    return latent, k_rope


def latent_attention(
    module: Any,
    query: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over a latent: absorbed, or with keys and values as the class expands them.

    The absorbed path reads `kv_b_proj.weight` in place of calling `kv_b_proj`, as long as that is plain (`is_plain`); an
    adapter or a hook on it is called. In training mode everything is as in the class.

    Args:
        module: The attention module.
        query: `[B, H, T, N + P]`.
        latent: `[B, 1, S, R]`.
        k_rope: `[B, 1, S, P]`.
        attention_mask: A mask of the form that the config's attention implementation takes (see `dense_mask`).
        scaling: The factor of the scores.
        kwargs: All else that the class passes to its attention function.

    Returns:
        `[B, T, H, Dv]`, and with eager attention the probabilities `[B, H, T, S]`, else None.
    """
    chosen, padding = module.config.stock._attn_implementation, module.config.when == "never"
    if not can_absorb(module, query.shape[2], latent.shape[2], attention_mask, kwargs):
        keys, values = type(module).expand_kv(module, latent, k_rope)
        own = eager
        if module.training or padding:
            own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", eager)
        if values.device.type == "cpu" and chosen == STOCK and (padding or not module.training):
            values = widened(values, keys.shape[-1])
        function = ALL_ATTENTION_FUNCTIONS.get_interface(chosen, own)
        out, probabilities = function(_AsStock(module), query, keys, values, attention_mask, scaling=scaling, **kwargs)
        return out[..., : module.v_head_dim], probabilities
    q_nope, q_rope = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), -1)
    returned = chosen == "eager"  # the one that returns probabilities
    if returned or not isinstance(latent, Stored):
        latent, k_rope = latent[:, 0], k_rope[:, 0]
    up_k, up_v = module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1)).split(
        (module.qk_nope_head_dim, module.v_head_dim), 1
    )  # [H, N, R], [H, Dv, R]
    q_latent = torch.einsum("bhtn,hnr->bhtr", q_nope, up_k)
    dense, probabilities = dense_mask(attention_mask, latent), None
    if returned:
        softcap = kwargs.get("softcap")
        probabilities = torch_decode.probabilities(q_latent, q_rope, latent, k_rope, dense, scaling, softcap)
        o_latent = torch_decode.read(probabilities, latent)
    else:
        o_latent = decode(q_latent, q_rope, latent, k_rope, dense, scaling, module.config.backend)
    return torch.einsum("bhtr,hdr->bthd", o_latent, up_v), probabilities


def can_absorb(module: Any, queries: int, cached: int, mask: torch.Tensor | BlockMask | None, given: Mapping[str, Any]) -> bool:
    """Whether T = `queries` new tokens over S = `cached` tokens are absorbed; `given`: other arguments of the function."""
    chosen, when = module.config.stock._attn_implementation, module.config.when
    if module.training or when == "never" or not is_plain(module.kv_b_proj):
        return False
    # What they mean is known to the attention function alone: masks of flex attention; masks and lengths of a paged cache.
    if isinstance(mask, BlockMask) or any(name in given for name in _OF_PAGES):
        return False
    whole = mask is not None and mask.ndim == 4  # with a row for each query
    # Otherwise what several queries see (causal from which corner, packed sequences) depends on the attention function.
    if queries > 1 and not whole:
        return False
    if given.get("softcap") is not None and chosen != "eager":  # kernels have no caps
        return False
    window = given.get("sliding_window")  # flash attention takes it as an argument, and its masks do not have it
    if window is not None and cached > window and not whole:
        return False
    sizes = module.kv_lora_rank, module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    return bool(when == "always" or absorbs(queries, cached, *sizes))


def is_plain(module: nn.Module) -> bool:
    """Whether `module` is a linear map by a weight that is in memory, without adapter, quantisation or hook."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks or replaced_forward(module):
        return False
    return type(module.weight) is nn.Parameter and not module.weight.is_meta


def dense_mask(mask: torch.Tensor | None, latent: torch.Tensor) -> torch.Tensor | None:
    """Convert masks of transformers' attention implementations to one form.

    Args:
        mask: None (every token is seen); for eager and sdpa `[B, 1, T, S]`, added to the scores or, if bool, true where a
            token is seen; for flash attention, with one query, `[B, S']`, nonzero where one of the first S' ≤ S tokens is not
            padding.
        latent: `[B, S, R]` or `[B, 1, S, R]`.

    Returns:
        None, or a mask as for eager and sdpa.

    Raises:
        Refusal: A padding mask is longer than the cache.
    """
    if mask is None or mask.ndim == 4:
        return mask
    cached, known = latent.shape[-2], mask.shape[1]
    if known > cached:
        raise Refusal(
            f"cannot attend with a padding mask of {known} tokens to a cache of {cached}: it may have no more",
            "give the mask of the tokens that are in the cache",
        )
    return nn.functional.pad(mask.bool(), (0, cached - known))[:, None, None]
