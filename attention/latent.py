"""Multi-head latent attention (MLA) that decodes directly over the cached latent instead of expanding it.

transformers caches the latent of each token, c [R], and its rotary key [P], but at every step expands the whole cache to keys
and values of H heads. The expansion is linear, so queries and outputs can absorb it (DeepSeek-V2, arXiv 2405.04434, 2.1.2):

    scores  = q_nopeᵀ (W_UK c) + q_ropeᵀ k_rope = (W_UKᵀ q_nope)ᵀ c + q_ropeᵀ k_rope
    outputs = Σ p (W_UV c)                      = W_UV (Σ p c)

One latent then serves all heads: a step reads S (R + P) values instead of making S · H · (N + Dv). `LatentAttention`
is a mixin for an attention class, stock or kvfold's own; `attention.patch` makes the classes and puts them into a model.
Letters as in `attention`; a query head has N nope dims and P rope dims, a value head has Dv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Attention

from attention.errors import Refusal
from attention.forward import widened
from attention.grouped import replaced_forward
from attention.kernels import Backend, decode, torch_decode
from attention.models.modeling_kvfold import KvfoldLatentAttention, eager, is_paged, taken_cache
from attention.stored import Stored

When = Literal["auto", "always"]

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


class LatentAttention(nn.Module):
    """Mixin for an MLA attention class: the same weights, cache layout and results, other arithmetic.

    In training mode it runs that class's forward. Otherwise `absorbs` chooses between its arithmetic (the prefill) and
    the absorbed one (decoding). The absorbed one reads `kv_b_proj.weight` in place of calling `kv_b_proj`, as long as that is
    plain (`is_plain`); an adapter or a hook on it is called.

    Attributes:
        always: Whether all calls that can be are absorbed, whatever `absorbs` says.
        backend: See `attention.kernels.decode`.
    """

    always: bool
    backend: Backend
    if TYPE_CHECKING:  # attributes of the class

        def __getattr__(self, name: str) -> Any: ...

    def attend(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | BlockMask | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as the class does.

        Args:
            hidden_states: `[B, T, E]`.
            position_embeddings: Cosines and sines of the model, as the class takes them.
            attention_mask: A mask of the form that the config's attention implementation takes (see `dense_mask`).
            kwargs: The cache (`taken_cache`); all else is passed to the attention function of the expanded path.

        Returns:
            `[B, T, E]`, and with eager attention the probabilities `[B, H, T, S]`, else None.

        Raises:
            TypeError: An argument is not known.
        """
        if self.training:
            kwargs |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            return super().forward(hidden_states, **kwargs)
        cache = taken_cache(self, kwargs)
        attention_mask = self.windowed(attention_mask, self.config._attn_implementation, hidden_states, cache)
        q_nope, q_rope = self.queries(hidden_states).split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        latent, k_rope = self._latent(hidden_states)
        q_rope, k_rope = self.rotated(q_rope, k_rope, position_embeddings)
        if cache is not None:
            latent, k_rope = cache.update(latent, k_rope, self.layer_idx, kwargs=kwargs)
        attention_mask = self.mask_with_positions(attention_mask, q_nope, latent.shape[2], kwargs)
        # What they mean is known to the attention function alone: masks of flex attention; masks and lengths of a paged cache.
        foreign = "cache" in kwargs or is_paged(cache)
        sizes = hidden_states.shape[1], latent.shape[2]
        if foreign or isinstance(attention_mask, BlockMask) or not self._absorbs(*sizes, attention_mask):
            out, probabilities = self._expanded(q_nope, q_rope, latent, k_rope, attention_mask, **kwargs)
        else:
            out, probabilities = self._absorbed(q_nope, q_rope, latent, k_rope, attention_mask)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), probabilities

    def _absorbs(self, queries: int, cached: int, mask: torch.Tensor | None) -> bool:
        whole = mask is not None and mask.ndim == 4  # with a row for each query
        # Otherwise what several queries see (causal from which corner, packed sequences) depends on the attention function.
        if (queries > 1 and not whole) or not is_plain(self.kv_b_proj):
            return False
        given = self.attention_arguments()
        if given.get("softcap") is not None and self.config._attn_implementation != "eager":  # kernels have no caps
            return False
        window = given.get("sliding_window")  # flash attention takes it as an argument, and its masks do not have it
        if window is not None and cached > window and not whole:
            return False
        sizes = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        return self.always or absorbs(queries, cached, *sizes)

    def _latent(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent `[B, 1, T, R]` and the rotary key `[B, 1, T, P]`, not rotated yet, that are cached for each token."""
        latent, rope = self.compressed(hidden_states).split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        return self.kv_a_layernorm(latent)[:, None], rope[:, None]

    def _expanded(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        mask: torch.Tensor | BlockMask | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The arithmetic of the class: `[B, T, H, Dv]`, and probabilities if the attention function returns them."""
        keys, values = self.expand_kv(latent, k_rope)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        queries = torch.cat((q_nope, q_rope), -1)
        if values.device.type == "cpu" and self.config._attn_implementation == "sdpa":
            values = widened(values, self.qk_head_dim)
        kwargs |= {"dropout": 0.0, **self.attention_arguments()}
        out, probabilities = function(self, queries, keys, values, mask, scaling=self.scaling, **kwargs)
        return out[..., : self.v_head_dim], probabilities

    def _absorbed(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over `latent [B, 1, S, R]` and `k_rope [B, 1, S, P]`: `[B, T, H, Dv]`, and probabilities if eager."""
        returned = self.config._attn_implementation == "eager"  # the one that returns probabilities
        if returned or not isinstance(latent, Stored):
            latent, k_rope = latent[:, 0], k_rope[:, 0]
        up_k, up_v = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split(
            (self.qk_nope_head_dim, self.v_head_dim), 1
        )  # [H, N, R], [H, Dv, R]
        q_latent = per_head(q_nope, up_k)  # [B, H, T, R]
        dense = dense_mask(mask, latent)
        probabilities = None
        if returned:
            probabilities = torch_decode.probabilities(
                q_latent, q_rope, latent, k_rope, dense, self.scaling, self.attention_arguments().get("softcap")
            )
            o_latent = torch_decode.read(probabilities, latent)
        else:
            o_latent = decode(q_latent, q_rope, latent, k_rope, dense, self.scaling, self.backend)
        return per_head(o_latent, up_v.transpose(1, 2)).transpose(1, 2), probabilities


class StockLatentAttention(LatentAttention):
    """`LatentAttention` for DeepSeek's class and those that equal it."""

    forward = LatentAttention.attend

    def attention_arguments(self) -> dict[str, Any]:
        """The arguments of attention functions besides tensors and the scale."""
        return {}

    def windowed(self, mask: Any, chosen: str, hidden_states: torch.Tensor, cache: Any) -> Any:
        """The mask: these classes have no windows."""
        return mask

    def mask_with_positions(self, attention_mask: Any, queries: torch.Tensor, cached: int, given: dict[str, Any]) -> Any:
        """The mask: these classes add nothing to scores by position."""
        return attention_mask

    def queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, H, T, N + P]`, not rotated."""
        if self.q_lora_rank is None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        return queries.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)

    def compressed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The latent and the RoPE key, not rotated, `[B, T, R + P]`."""
        return self.kv_a_proj_with_mqa(hidden_states)

    def rotated(
        self, q_rope: torch.Tensor, k_rope: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE of queries `[B, H, T, P]` and keys `[B, 1, T, P]`."""
        # MiniCPM3's class pairs dims of two halves, whatever the config says.
        interleaved = not isinstance(self, MiniCPM3Attention) and self.config.rope_interleave
        rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
        return rotate(q_rope, k_rope, *position_embeddings)


class OwnLatentAttention(LatentAttention, KvfoldLatentAttention):
    """`LatentAttention` for kvfold's own class, which is called as the attention of many classes is."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        attention_mask: torch.Tensor | BlockMask | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as the class does (`attend`)."""
        out, probabilities = self.attend(hidden_states, position_embeddings, attention_mask, **kwargs)
        return out if residual is None else out + residual, probabilities


def is_plain(module: nn.Module) -> bool:
    """Whether `module` is a linear map by a weight that is in memory, without adapter, quantisation or hook."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks or replaced_forward(module):
        return False
    return type(module.weight) is nn.Parameter and not module.weight.is_meta


def per_head(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`states [B, H, T, i]` times `weight [H, i, j]` is `[B, H, T, j]`: one product per head, no copy of the weight."""
    batch, heads, tokens, _ = states.shape
    product = torch.bmm(states.transpose(0, 1).reshape(heads, batch * tokens, -1), weight)
    return product.view(heads, batch, tokens, -1).transpose(0, 1)


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
