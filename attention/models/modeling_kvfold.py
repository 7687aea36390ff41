"""A transformers model whose attention was replaced: for results that no stock class can hold.

It builds a stock class, which is the source's or computes the same, and puts attention of its own in the place of each layer's
attention: grouped (GQA, MQA), also for classes that ignore `num_key_value_heads`, or latent (MLA). It caches as little as these
need.

This file and `configuration_kvfold.py` are all that such a checkpoint needs: kvfold copies them beside the weights, for
`trust_remote_code=True`. They import nothing else of kvfold.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import TransformersKwargs

from .configuration_kvfold import KvfoldConfig  # relative, so that it is found beside the weights, too

CODE_VERSION = 1  # as in `configuration_kvfold.py`
_BESIDE = getattr(sys.modules[KvfoldConfig.__module__], "CODE_VERSION", None)
if _BESIDE != CODE_VERSION:
    raise ImportError(
        f"modeling_kvfold.py has version {CODE_VERSION}, and configuration_kvfold.py beside it has {_BESIDE or 'none'}: "
        "run `convert refresh` of kvfold on the directory of this checkpoint, which renews both"
    )
# The config key of the dropout that a class has inside its attention, behind the output projection.
_OUTPUT_DROPOUT = {
    "bloom": "hidden_dropout", "gpt2": "resid_pdrop", "gpt_bigcode": "resid_pdrop", "gpt_neo": "resid_dropout",
    "seed_oss": "residual_dropout", "starcoder2": "residual_dropout",
}  # fmt: skip
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # keys of that of probabilities

# What layers call the cache that their attention updates: some `layer_past`, others `past_key_values`, or `cache` from
# transformers 5.24 on.
_CACHES = ("past_key_values", "layer_past", "cache")
_STEP = "Use an older transformers, or run `convert refresh` of a newer kvfold on the checkpoint."
# Other arguments of attention that do not change what ours computes, or that its attention function takes: those that
# transformers declares, what its layers hand to every attention, and the layers of engines that run transformers' models.
_OTHERS = {
    *TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__,
    "alibi", "position_bias", "use_cache", "cache_position", "attention_instances", "forward_batch",
    # what callers give to a whole model, and models pass through
    "token_type_ids", "mm_token_type_ids", "return_dict", "labels", "shift_labels", "ignore_index",
}  # fmt: skip


def taken_cache(module: Any, given: dict[str, Any]) -> Any:
    """Take the cache out of the arguments that a layer gives to its attention `module`; refuse arguments that are not known.

    Continuous batching has a paged cache. Up to transformers 5.23 it comes as `cache`, its attention functions update it, and
    it stays in `given`; from 5.24 on, the attention updates it like any other.

    Returns:
        The cache, or None.

    Raises:
        TypeError: An argument is not known; it may hold the cache, without which the text would be wrong.
    """
    if is_paged(given.get("cache")):  # whose other arguments are its own
        if given.get("alibi") is not None or given.get("position_bias") is not None:
            raise ValueError("this model adds biases to scores (ALiBi), which continuous batching leaves out; use `generate`")
        return None if _functions_update_pages() else given.pop("cache")
    named = [given.pop(name, None) for name in _CACHES]
    for name, value in given.items():
        if name not in _OTHERS and value is not None:
            what = "the cache" if isinstance(value, Cache) else f"a {type(value).__name__}"
            raise TypeError(
                f"{type(module).__name__} of kvfold (code version {CODE_VERSION}) does not know its argument {name!r}, which "
                f"holds {what}, in transformers {transformers.__version__}. {_STEP}"
            )
    return next((cache for cache in named if cache is not None), None)


_TRIED: set[tuple[Any, ...]] = set()  # classes that `require_decoding` has passed
_TOKENS, _STEPS = 9, 3  # of its text, and of those that are read one by one
_ALIKE = 1e-4  # of the largest output, in fp32


def require_decoding(model: Any, attentions: Collection[Any] | None = None) -> None:
    """Refuse a model whose class, in the running version of transformers, does not read over a cache what it reads at once.

    Its first layers, one of each kind, read a few random embeddings in fp32: at once, and in parts over a cache. What they put
    out is compared. Where they cannot be in fp32 (quantised, flash attention, no memory), only the number of cached tokens is.
    Each class is tried once in a process, in under a second for 7B parameters on two CPU cores. Not tried are windows of more
    tokens, and models whose weights are not all in memory.

    Args:
        model: In eval mode.
        attentions: The modules in it that are to be tried; None for those of this file.

    Raises:
        RuntimeError: The class caches nothing, or other tokens, or its outputs differ.
        TypeError: A layer gives its attention an argument that it does not know (`taken_cache`).
    """
    config, embedding = model.config.get_text_config(decoder=True), model.get_input_embeddings()
    stock = model.model if isinstance(model, KvfoldForCausalLM) else model
    decoder = stock.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # ModernBERT's class calls its head so
        decoder = stock.base_model
    chosen: str = decoder.config._attn_implementation
    if attentions is None:
        attentions = [module for module in model.modules() if isinstance(module, _Attention)]
    # Some may have been packed, or absorbed.
    indices = {module.layer_idx for module in attentions}
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    kinds = {f"{type(module)} {type(module.config)} {types[module.layer_idx]}" for module in attentions}
    tried = (type(model), config.model_type, chosen, *sorted(kinds))
    absent = any(weight.is_meta or not weight.numel() for weight in decoder.parameters())  # offloaded, or sharded by DeepSpeed
    wide = "flash" in chosen and decoder.dtype.itemsize > 2  # which flash attention does not take
    if not kinds or tried in _TRIED or absent or wide:
        return
    drawn = torch.randn(1, _TOKENS, embedding.weight.shape[-1], generator=torch.Generator().manual_seed(0))
    firsts = {types[layer]: layer for layer in sorted(indices, reverse=True)}
    with (
        torch.no_grad(),
        _first_layers(decoder, len(types), max(firsts.values()) + 1) as layers,
        _in_fp32(decoder, embedding) as exact,
    ):
        behind = (weight.dtype for weight in decoder.parameters() if weight is not embedding.weight)
        states = drawn.to(embedding.weight.device, next(behind) if exact else decoder.dtype)
        expected, found = decoder(inputs_embeds=states, use_cache=False).last_hidden_state, []
        cache: dict[str, Any] = {}
        for part in states.split([_TOKENS - _STEPS, *[1] * _STEPS], 1):
            out = decoder(inputs_embeds=part, use_cache=True, **cache)
            found.append(out.last_hidden_state)
            cache = {name: out[name] for name in ("past_key_values", "cache") if name in out.keys()}  # noqa: SIM118  # as named
        held = {held.get_seq_length(layer) for held in cache.values() for layer in indices.intersection(range(layers))}
    error = (torch.cat(found, 1) - expected).abs().max() if exact else torch.zeros(()).to(expected)
    if held != {_TOKENS} or error > _ALIKE * expected.abs().max():
        said = f"it caches {' or '.join(map(str, sorted(held))) or 'none'} of {_TOKENS} tokens, and outputs are {error:.2g} off"
        raise RuntimeError(
            f"kvfold's attention (code version {CODE_VERSION}) in {type(model).__name__} of a {config.model_type} does not "
            f"decode as it reads in transformers {transformers.__version__}: {said}. {_STEP}"
        )
    if exact:
        _TRIED.add(tried)


@contextlib.contextmanager
def _first_layers(decoder: Any, count: int, kept: int) -> Iterator[int]:
    """Leave a decoder the first `kept` of its `count` layers, if it has a list of them; gives how many it has then."""
    owners = [
        (owner, name, whole)
        for owner in decoder.modules()
        for name, whole in owner.named_children()
        if isinstance(whole, nn.ModuleList) and len(whole) == count
    ]
    try:
        for owner, name, whole in owners:
            setattr(owner, name, nn.ModuleList(list(whole)[:kept]))
        yield kept if owners else count
    finally:
        for owner, name, whole in owners:
            setattr(owner, name, whole)


@contextlib.contextmanager
def _in_fp32(decoder: Any, embedding: Any) -> Iterator[bool]:
    """Let a decoder compute in fp32 behind its embedding, if it can; gives whether it does. Its weights come back unchanged."""
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    exact = all(weight.dtype in plain and type(weight.data) is torch.Tensor for weight in decoder.parameters())
    exact = exact and "flash" not in decoder.config._attn_implementation
    weights = [weight for weight in [*decoder.parameters(), *decoder.buffers()] if exact and weight is not embedding.weight]
    kept = [(weight, weight.data) for weight in weights if weight.dtype in plain[:2]]
    try:
        try:
            for weight, data in kept:
                weight.data = data.float()
        except RuntimeError:  # no memory, on a GPU or on a CPU
            exact = False
            for weight, data in kept:
                weight.data = data
        yield exact
    finally:
        for weight, data in kept:
            weight.data = data


def is_paged(cache: Any) -> bool:
    """Whether a cache is that of continuous batching."""
    return cache is not None and not isinstance(cache, Cache)


@functools.cache
def _functions_update_pages() -> bool:
    return "cache" in inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters


class _Attention(nn.Module):
    """The base of both kinds of attention, called as the attention that it replaces.

    If the source has QK-norm or a clamp, its projections and norms stay: queries are mapped head by head behind them, and what
    is cached is made of the keys and values of all heads. Letters: B batch, T query tokens, S cached tokens, E model width, H
    query heads, G KV heads of the source, D head dim; R, P, N and Dv as in the config.

    Args:
        config: The whole model's config.
        layer_idx: The index of the layer, by which the cache knows it.
        sliding_window: How many tokens the layer sees; None for all. The source's class makes masks and caches for it, unless
            the config has it as an inner window.
    """

    o_proj: nn.Linear

    def __init__(self, config: KvfoldConfig, layer_idx: int, sliding_window: int | None = None) -> None:
        nn.Module.__init__(self)  # not that of the attention that `_grafted` adds as a base
        inner: Any = config.text_config
        self.config, self.layer_idx, self.scaling, self.is_causal = inner, layer_idx, config.scaling, True
        self.num_heads, self.clip, self.kept = inner.num_attention_heads, config.clip_qkv, bool(config.kept_layers)
        self.behind = config.qk_norm is not None or config.clip_qkv is not None
        self.inner_window = config.inner_windows[layer_idx] if config.inner_windows else None
        self.sliding_window = sliding_window if self.inner_window is None else self.inner_window
        self.attention_dropout = next((getattr(inner, key) for key in _DROPOUT if hasattr(inner, key)), 0.0)
        self.softcap = getattr(inner, "attn_logit_softcapping", None)
        self.output_dropout = getattr(inner, _OUTPUT_DROPOUT.get(inner.model_type, ""), 0.0)

    def make_queries(self, config: KvfoldConfig, made: int) -> int:
        """Make the projection of queries; behind a norm or clamp, the source's projections and norms, and each head's map.

        Args:
            config: The whole model's config.
            made: Dims of a head's queries.

        Returns:
            How many numbers of a token `made_of` gives.
        """
        inner: Any = config.text_config
        self.made = made
        if not self.behind:
            self.q_proj = nn.Linear(inner.hidden_size, self.num_heads * made, bias=config.qkv_bias)
            return int(inner.hidden_size)
        dim = getattr(inner, "head_dim", None) or inner.hidden_size // self.num_heads
        kv_heads = config.projected_kv_heads or getattr(inner, "num_key_value_heads", None) or self.num_heads
        self.q_proj = nn.Linear(inner.hidden_size, self.num_heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inner.hidden_size, kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inner.hidden_size, kv_heads * dim, bias=config.qkv_bias)
        norm = functools.partial(_HeadNorm, config.qk_norm) if config.qk_norm is not None else nn.Identity
        self.q_norm, self.k_norm = norm(self.num_heads, dim), norm(kv_heads, dim)
        self.q_head_proj = _PerHead(self.num_heads, dim, made)
        return 2 * kv_heads * dim

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend.

        Args:
            hidden_states: `[B, T, E]`.
            residual: `[B, T, E]`, what the source's attention adds to its output; None where the layer adds it.
            attention_mask: As the config's attention implementation takes it.
            position_embeddings: Cosines and sines `[B or 1, T, rotary dims]`, of which both halves are equal, or each two
                neighbours where the config has a stride; or None.
            kwargs: The cache (`taken_cache`), and biases by position (`mask_with_positions`); all else is passed to the
                attention function.

        Returns:
            `[B, T, E]`, and the probabilities if the attention function returns them.
        """
        if self.kept and is_paged(kwargs.get("cache")):
            raise ValueError("continuous batching has caches of one size, and layers of this model differ: use `generate`")
        cache, chosen = taken_cache(self, kwargs), self.config._attn_implementation
        queries, first, second = self.parts(hidden_states, position_embeddings)
        attention_mask = self.windowed(attention_mask, chosen, hidden_states, cache)
        if cache is not None:
            first, second = cache.update(first, second, self.layer_idx, kwargs=kwargs)
        keys, values = self.expand_kv(first, second)
        attention_mask = self.mask_with_positions(attention_mask, queries, keys.shape[2], kwargs)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(chosen, eager)
        dropout = self.attention_dropout if self.training else 0.0
        kwargs |= {"dropout": dropout, **self.attention_arguments()}
        # vLLM reads the scale from the source of this call.
        out, probabilities = attend(self, queries, keys, values, attention_mask, scaling=self.scaling, **kwargs)  # [B, T, H, D]
        out = self.o_proj(out.reshape(*hidden_states.shape[:-1], -1))
        out = nn.functional.dropout(out, self.output_dropout, self.training)
        return out if residual is None else out + residual, probabilities

    def parts(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, and the two parts that are cached, `[B, heads, T, …]` each, rotated."""
        raise NotImplementedError

    def expand_kv(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, heads, S, …]` of what is cached."""
        return first, second

    def queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, H, T, D or N + P]`, not rotated."""
        queries = self.q_proj(hidden_states)
        if not self.behind:
            return queries.unflatten(-1, (-1, self.made)).transpose(1, 2)  # of as many heads as a process has
        heads = self.q_norm(queries.unflatten(-1, (self.num_heads, -1)))
        return self.q_head_proj(self._clipped(heads)).transpose(1, 2)

    def made_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What is cached is made of these: the input, or the source's keys and values, side by side, `[B, T, 2 G D]`."""
        if not self.behind:
            return hidden_states
        keys = self.k_norm(self.k_proj(hidden_states).unflatten(-1, (-1, self.q_head_proj.weight.shape[-1]))).flatten(2)
        return self._clipped(torch.cat((keys, self.v_proj(hidden_states)), -1))

    def _clipped(self, states: torch.Tensor) -> torch.Tensor:
        return states if self.clip is None else states.clamp(-self.clip, self.clip)

    def attention_arguments(self) -> dict[str, Any]:
        """The arguments of attention functions besides tensors and the scale."""
        capped = {} if self.softcap is None else {"softcap": self.softcap}
        return {"sliding_window": self.sliding_window, **capped}

    def windowed(
        self, mask: torch.Tensor | None, chosen: str, hidden_states: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor | None:
        """The mask with the layer's inner window, where the attention function does not add it.

        Args:
            mask: As the attention function takes it.
            chosen: The name of that function.
            hidden_states: `[B, T, E]`.
            cache: The cache, to which these tokens are not added yet; or None.
        """
        if self.inner_window is None or "flash" in chosen:  # flash attention takes windows as an argument
            return mask
        if "paged" in chosen or is_paged(cache) or not (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 4)):
            raise ValueError(f"this model has windows in its attention, which {chosen} leaves out; use eager attention")
        tokens = hidden_states.shape[1]
        past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        cached = tokens if cache is None else cache.get_mask_sizes(tokens, self.layer_idx)[0]
        position = torch.arange(tokens, device=hidden_states.device)[:, None] + past
        slots = torch.arange(cached, device=hidden_states.device)
        seen = slots > position - self.inner_window
        if mask is None:
            return (seen & (slots <= position))[None, None]
        return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)

    def mask_with_positions(
        self, attention_mask: torch.Tensor | None, queries: torch.Tensor, cached: int, given: dict[str, Any]
    ) -> torch.Tensor | None:
        """The mask with what the source's class adds to scores by position (ALiBi).

        Args:
            attention_mask: As the attention takes it.
            queries: `[B, H, T, …]`.
            cached: S.
            given: The other arguments of the attention; those with such biases are taken out.

        Returns:
            The mask; with biases `[B, H, T, S]`, added to the scores.
        """
        of_tokens, of_distances = given.pop("alibi", None), given.pop("position_bias", None)
        if of_tokens is None and of_distances is None:
            return attention_mask
        if attention_mask is None or attention_mask.ndim != 4:
            raise ValueError("this model adds ALiBi to the masks of eager attention; load it with attn_implementation='eager'")
        if of_tokens is not None:  # BLOOM: [B H, 1, S]
            bias = of_tokens.view(len(queries), -1, 1, of_tokens.shape[-1])
        else:  # MPT: [H, 1, most positions], of which the last ones are for the last tokens
            bias = of_distances[:, :, max(0, of_distances.shape[-1] - cached) :]
        # In half precision, biases of 1000 would be rounded to steps of 4: the attention adds them in fp32.
        bias = bias.to(torch.promote_types(queries.dtype, torch.float32))
        if attention_mask.dtype == torch.bool:  # MPT: true where a token is not seen
            return bias.masked_fill(attention_mask, torch.finfo(bias.dtype).min / 2)
        return bias + attention_mask


class _HeadNorm(nn.Module):
    """QK-norm: RMSNorm or LayerNorm of states `[B, T, heads, D]`, of each head or of all of them together.

    Args:
        form: `qk_norm` of the config.
        heads: How many there are.
        dim: D.
    """

    def __init__(self, form: dict[str, Any], heads: int, dim: int) -> None:
        super().__init__()
        self.centred, self.eps, self.gain_offset = form["kind"] == "layer", form["eps"], form["gain_offset"]
        self.dims = (-1,) if form["scope"] == "head" else (-2, -1)
        self.weight = nn.Parameter(torch.ones(heads if form["per_head"] else 1, dim))
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if form["bias"] else None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        exact = torch.promote_types(states.dtype, torch.float32)
        found = states.to(exact)
        if self.centred:
            found = found - found.mean(self.dims, keepdim=True)
        # vLLM takes a product with `rsqrt` for a norm of other gains than these.
        found = found / (found.square().mean(self.dims, keepdim=True) + self.eps).sqrt()
        found = found * (self.weight.to(exact) + self.gain_offset)
        return (found if self.bias is None else found + self.bias).to(states)


class _PerHead(nn.Module):
    """One matrix for each head: `[B, T, heads, i]` to `[B, T, heads, o]`, with `weight [heads, o, i]`."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, outputs, inputs))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bthi,hoi->btho", states, self.weight)


class GroupedAttention(_Attention):
    """Attention whose query heads share KV heads.

    Heads have one scale, and RoPE in pairs of which the second half of the rotary dims follows the first, or none. Arguments as
    in `_Attention`.
    """

    def __init__(self, config: KvfoldConfig, layer_idx: int, sliding_window: int | None = None) -> None:
        super().__init__(config, layer_idx, sliding_window)
        inner: Any = config.text_config
        kv_heads = config.shared_kv_heads or inner.num_key_value_heads
        self.head_dim = getattr(inner, "head_dim", None) or inner.hidden_size // self.num_heads
        self.num_key_value_groups = self.num_heads // kv_heads
        self.rotates, self.rope_stride = layer_idx not in (config.unrotated_layers or ()), config.rope_stride
        width, biased = self.make_queries(config, self.head_dim), config.qkv_bias and not self.behind
        keys, values = (nn.Linear(width, kv_heads * self.head_dim, bias=biased) for _ in range(2))
        if self.behind:
            self.k_head_proj, self.v_head_proj = keys, values
        else:
            self.k_proj, self.v_proj = keys, values
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, inner.hidden_size, bias=config.o_bias)

    def parts(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[B, heads, T, D]`."""
        queries, read = self.queries(hidden_states), self.made_of(hidden_states)
        made = (self.k_head_proj, self.v_head_proj) if self.behind else (self.k_proj, self.v_proj)
        keys, values = (project(read).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in made)
        if position_embeddings is not None and self.rotates:
            cos, sin = (table if self.rope_stride == 1 else _in_halves(table) for table in position_embeddings)
            # Some classes (OLMo) rotate in the tables' fp32.
            queries, keys = (_rotated(states, cos, sin).to(states) for states in (queries, keys))
        return queries, keys, values


class KvfoldLatentAttention(_Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    It caches a latent and one RoPE key for each token. Unlike DeepSeek's, the latent has no norm, queries may have biases, and
    the RoPE key, which may be of no dims, rotates with some of the frequencies of the source. Arguments as in `_Attention`.
    """

    def __init__(self, config: KvfoldConfig, layer_idx: int, sliding_window: int | None = None) -> None:
        super().__init__(config, layer_idx, sliding_window)
        inner: Any = config.text_config
        self.num_key_value_groups, self.q_lora_rank = 1, None
        self.kv_lora_rank, self.qk_rope_head_dim = inner.kv_lora_rank, inner.qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = inner.qk_nope_head_dim, inner.v_head_dim
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.rope_columns = [pair * config.rope_stride for pair in config.rope_pairs or []]
        factors = config.rope_factor
        self.rope_factor = factors[layer_idx] if isinstance(factors, list) else factors
        width, biased = self.make_queries(config, self.qk_head_dim), config.qkv_bias and not self.behind
        cached = self.kv_lora_rank + self.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(width, cached, bias=biased and self.qk_rope_head_dim > 0)
        self.kv_a_layernorm = nn.Identity()  # where DeepSeek's classes have a norm
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, inner.hidden_size, bias=config.o_bias)

    def parts(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries `[B, H, T, N + P]`, the latent `[B, 1, T, R]` and the RoPE key `[B, 1, T, P]`, whose pairs are P/2 apart."""
        nope, rope = self.queries(hidden_states).split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        latent, k_rope = self.compressed(hidden_states)[:, None].split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        if self.rope_columns:
            if position_embeddings is None:
                raise ValueError("the RoPE key rotates, and the class around this attention gives it no cosines and sines")
            chosen = self.rope_columns * 2
            cos, sin = (table[..., chosen] / self.rope_factor for table in position_embeddings)
            # Some classes (OLMo) rotate in the tables' fp32.
            rope, k_rope = (_rotated(states, cos, sin).to(states) for states in (rope, k_rope))
        return torch.cat((nope, rope), -1), latent, k_rope

    def compressed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The latent and the RoPE key, not rotated, `[B, T, R + P]`."""
        return self.kv_a_proj_with_mqa(self.made_of(hidden_states))

    def expand_kv(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[B, H, S, N + P]` and values `[B, H, S, Dv]` of a latent `[B, 1, S, R]` and a RoPE key `[B, 1, S, P]`."""
        both = self.kv_b_proj(latent[:, 0]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        nope, values = both.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        return torch.cat((nope, k_rope.expand(-1, self.num_heads, -1, -1)), -1), values

    def attention_arguments(self) -> dict[str, Any]:
        """As for all attention, where the function caps logits or refuses a cap."""
        if self.softcap is not None and self.config._attn_implementation.endswith("paged|eager"):
            raise ValueError("this model caps the logits of its attention, which paged|eager leaves out; use flash attention")
        return super().attention_arguments()


@functools.cache
def _grafted(attention: type[nn.Module], stock: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the attention that it replaces, too: transformers finds modules that give probabilities by their class."""

    def reduced(module: nn.Module) -> tuple[Any, ...]:  # pickle finds no class by such a name
        return _blank, (attention, stock), vars(module)

    name = f"{attention.__name__.removesuffix('Attention')}{stock.__name__}"
    return type(name, (attention, stock), {"__module__": __name__, "__reduce__": reduced})


def _blank(attention: Any, stock: Any) -> Any:
    """An attention of a class of `_grafted`, without state."""
    kind: Any = _grafted(attention, stock)
    return kind.__new__(kind)


def _graft(model: Any, config: KvfoldConfig, path: str) -> None:
    """Put attention of this file in the place of a stock model's, at `path` with `{layer}` for a layer's number; not in layers
    that are kept.
    """
    inner: Any = config.text_config
    attention: Any = GroupedAttention if getattr(inner, "kv_lora_rank", None) is None else KvfoldLatentAttention
    for layer in range(inner.num_hidden_layers):
        if layer in (config.kept_layers or ()):
            continue
        replaced: Any = model.get_submodule(path.format(layer=layer))
        kind: Any = type(replaced)
        made: Any = _grafted(attention, kind)(config, layer, _window(inner, replaced, layer))
        made.config = model.config  # whose attention function transformers changes
        model.set_submodule(path.format(layer=layer), made)


class KvfoldModel(PreTrainedModel):  # type: ignore[misc]
    """The base model of a stock class, with other attention and without a head; vLLM builds it.

    It has the name that the class with a head gives it, so that both have the same names of weights.
    """

    config: KvfoldConfig
    config_class = KvfoldConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: KvfoldConfig) -> None:
        super().__init__(config)
        stock: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config.text_config)]
        self.inner_name = stock.base_model_prefix
        self.add_module(self.inner_name, AutoModel.from_config(config.text_config))
        _graft(self.inner, config, config.attention_path.removeprefix(f"{self.inner_name}."))
        self._no_split_modules = self.inner._no_split_modules
        self.post_init()

    @property
    def inner(self) -> Any:
        """The stock model."""
        return self.get_submodule(self.inner_name)

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def get_decoder(self) -> Any:
        return self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock model."""
        return self.inner(*args, **kwargs)


class KvfoldForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A stock class, `model`, with other attention."""

    config: KvfoldConfig
    config_class = KvfoldConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: KvfoldConfig) -> None:
        inner: Any = config.text_config
        # The source's class is built with the same attention function.
        stock: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(inner)]
        capped = getattr(inner, "attn_logit_softcapping", None) is not None  # sdpa has no caps
        # transformers asks before this is a module.
        object.__setattr__(self, "_supports_sdpa", stock._supports_sdpa and not capped)
        object.__setattr__(self, "_supports_flash_attn", stock._supports_flash_attn)
        super().__init__(config)
        self.model = AutoModelForCausalLM.from_config(config.text_config)
        _graft(self.model, config, config.attention_path)
        self._no_split_modules = self.model._no_split_modules
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As of every class of transformers; what is loaded is tried (`require_decoding`)."""
        loaded = super().from_pretrained(*args, **kwargs)
        require_decoding(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def create_masks_for_generate(self, **arguments: Any) -> Any:
        """As the source's class, which may need other masks than most."""
        create: Any = getattr(self.model, "create_masks_for_generate", create_masks_for_generate)
        return create(**arguments)

    def prepare_inputs_for_generation(self, input_ids: Any, *args: Any, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        """As the source's class: Phi-3's computes the cache anew where LongRoPE changes its frequencies.

        transformers asks whether parameters are named `inputs_embeds` and `kwargs`.
        """
        own = type(self.model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
        prepare: Any = self.model.prepare_inputs_for_generation if own else super().prepare_inputs_for_generation
        return prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.set_output_embeddings(new_embeddings)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the stock class, which takes its cache as `past_key_values` or as `cache`."""
        named = {"past_key_values": past_key_values, "cache": cache}
        kwargs |= {name: held for name, held in named.items() if held is not None}
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )


def _window(config: Any, attention: Any, layer: int) -> int | None:
    """How many tokens a layer of the source's class sees; None for all."""
    kinds = config.layer_types if "layer_types" in type(config).__dataclass_fields__ else None  # else a stray key
    if kinds is None:  # such a class reads it from the config at each call
        return getattr(config, "sliding_window", None)
    # Exaone's attention has the window in every layer, and does not use it in all.
    return getattr(attention, "sliding_window", None) if kinds[layer] == "sliding_attention" else None


def _in_halves(table: torch.Tensor) -> torch.Tensor:
    """Cosines or sines `[…, dims]` of which two neighbours are equal, so that both halves are."""
    return torch.cat((table[..., ::2], table[..., ::2]), -1)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of the first dims of `states [B, heads, T, D]`, whose pairs are half of these dims apart."""
    dims = cos.shape[-1]
    rotary, rest = states[..., :dims], states[..., dims:]
    first, second = rotary.chunk(2, -1)
    rotated = rotary * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    return torch.cat((rotated, rest), -1)


def eager(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that returns its probabilities: `[B, T, H, D]` and `[B, H, T, S]`.

    Scores are at least fp32. In fp16, the mask of a row that sees no token, plus its scores, would be −∞, and the row NaN.
    """
    key, value = (states.repeat_interleave(module.num_key_value_groups, 1) for states in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = query.to(wide) @ key.to(wide).mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    elif attention_mask is not None:
        logits = logits + attention_mask
    probabilities = nn.functional.softmax(logits, -1).to(query.dtype)
    probabilities = nn.functional.dropout(probabilities, dropout, module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities
