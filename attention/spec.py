"""AttentionSpec: the sizes of a model's attention, and the bytes of its KV cache by the only formula (`AttentionSpec._bytes`).

All code that prints, plans or checks these bytes uses it. It reads no weights and no files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from attention import models
from attention.calibrated import OF_SOURCE, STATED
from attention.errors import Refusal
from attention.formats import FORMATS, PLAIN, Format, format_named

_NUMBERS = {
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim",
}  # fmt: skip
PRECISE, _ONE_IN = "precise_layers", 8  # a key of config.json; one latent of so many
RANK_STEP = 16  # of latent ranks that the CUDA kernel serves: as many values as the shortest matrix product takes


def _windows(config: Any) -> tuple[int | None, ...] | None:
    """The windows of a decoder's layers, as transformers decides what their caches keep; None where no layer has one.

    One over all positions of the model is none.

    Raises:
        Refusal: It makes no cache for this config.
    """
    from transformers.cache_utils import DynamicCache

    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # of many kinds: a missing key, a layer type that it does not know, null for a number
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise Refusal(f"transformers makes no KV cache for this config of type {config.model_type!r}: {reason}") from error
    limit = getattr(config, OF_SOURCE, None) or getattr(config, STATED, None) or math.inf
    read = [getattr(layer, "sliding_window", None) for layer in layers]
    read += [None] * (config.num_hidden_layers - len(read))  # layers that share the cache of another
    found = tuple(None if window is None or window >= limit else window for window in read)
    return found if any(found) else None


def dtype_bytes(dtype: str) -> int:
    """Bytes of one value of `dtype` ("float32", "float16", "bfloat16" or "float64")."""
    if dtype not in PLAIN:
        raise Refusal(f"no KV cache is kept in {dtype!r} (choose {', '.join(PLAIN)})")
    return FORMATS[dtype].bits // 8


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of a whole model: `num_layers` layers of `num_heads` query heads, and what they cache per token.

    Attributes:
        num_layers: L.
        num_heads: H.
        num_kv_heads: G. With a latent, which all heads share, it is H.
        head_dim: D.
        kv_lora_rank: R, the size of the latent that is cached instead of keys and values (MLA); None without one.
        qk_rope_head_dim: P, the size of the rotary key that is cached beside the latent.
        qk_nope_head_dim: N, the dims of a head's keys that come from the latent. Values have `head_dim`.
        q_lora_rank: The rank of a latent of queries that an engine needs; None for the queries of the output class. Configs are
            not asked for it.
        windows: How many tokens each layer sees, itself included, where its cache keeps no others (sliding windows, and chunks
            of attention); None for a layer that keeps all, and None if all layers do.
        kept: Layers that stay as the source has them. They cache keys and values of heads, and all else here is of the others.
        kept_kv_heads: G of these layers; 0 if there are none.
        precise: Layers with a latent, in the order of what rounding them costs copies; () where that was not measured.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    q_lora_rank: int | None = None
    windows: tuple[int | None, ...] | None = None
    kept: tuple[int, ...] = ()
    kept_kv_heads: int = 0
    precise: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise Refusal(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads: "
                f"the KV heads must divide the query heads"
            )

    @classmethod
    def from_config(cls, config: Any) -> AttentionSpec:
        """Read a transformers config (its text part, if it has several).

        Raises:
            Refusal: The config has no attention heads, its layers differ in them, or transformers makes no cache for it.
        """
        # Any other class ignores these keys.
        own = config if models.provides(getattr(config, "model_type", "")) else None
        kept, shared = (own.kept_layers or (), own.shared_kv_heads) if own else ((), None)
        precise = tuple(getattr(config, PRECISE, None) or ())
        config = config.get_text_config(decoder=True)
        if varying := sorted(_NUMBERS & (getattr(config, "per_layer_attributes", None) or set())):
            raise Refusal(f"model type {config.model_type!r} has layers that differ in {', '.join(varying)}")
        heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        if not isinstance(heads, int) or not isinstance(width, int):
            raise Refusal(f"model type {config.model_type!r} has no single number of attention heads in its config")
        if rank := getattr(config, "kv_lora_rank", None):
            sizes = config.qk_rope_head_dim, config.qk_nope_head_dim
            found = cls(config.num_hidden_layers, heads, heads, config.v_head_dim, rank, *sizes, precise=precise)
        else:
            found = cls.of_heads(config)
            found = replace(found, num_kv_heads=shared or found.num_kv_heads)
        found = replace(found, windows=_windows(config))
        return found.keeping(kept, cls.of_heads(config).num_kv_heads) if kept else found

    @classmethod
    def of_heads(cls, config: Any) -> AttentionSpec:
        """The keys and values that are projected, whether they are cached or a latent is made of them; without windows.

        Raises:
            Refusal: Layers differ in KV heads.
        """
        heads = config.num_attention_heads
        # Older configs say in their own way that one KV head is cached for all query heads. Their classes ignore the first
        # where the second is set, and then cache keys and values of every query head.
        shared = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
        kv_heads = getattr(config, "num_key_value_heads", None) or (1 if shared else heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        if not isinstance(kv_heads, int):
            raise Refusal(f"model type {config.model_type!r} has a different number of KV heads in every layer: {kv_heads}")
        return cls(config.num_hidden_layers, heads, kv_heads, head_dim)

    @property
    def kind(self) -> str:
        """The kind: "MHA", "GQA-8" (with the number of KV heads), "MQA" or "MLA-512+64" (rank and rotary dims), and in how many
        layers if some are kept.
        """
        where = f" in {len(self.changed)} of {self.num_layers} layers" if self.kept else ""
        if self.kv_lora_rank is not None:
            return f"MLA-{self.kv_lora_rank}+{self.qk_rope_head_dim}{where}"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return ("MQA" if self.num_kv_heads == 1 else f"GQA-{self.num_kv_heads}") + where

    def keeping(self, layers: Collection[int], kv_heads: int) -> AttentionSpec:
        """The same with these layers as the source has them, with so many KV heads."""
        return replace(self, kept=tuple(sorted(layers)), kept_kv_heads=kv_heads if layers else 0)

    @property
    def changed(self) -> tuple[int, ...]:
        """The layers that are not kept."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.kept)

    def is_latent(self, layer: int) -> bool:
        """Whether a layer caches a latent."""
        return self.kv_lora_rank is not None and layer not in self.kept

    @cached_property
    def unbounded(self) -> tuple[int, ...]:
        """The layers with a latent that no window bounds."""
        windows = self.windows or (None,) * self.num_layers
        return tuple(layer for layer in range(self.num_layers) if self.is_latent(layer) and windows[layer] is None)

    def count_precise(self, form: Format) -> int:
        """How many layers have a format of their own in a model whose cache has that format."""
        return 0 if form.precise is None else (len(self.unbounded) + _ONE_IN // 2) // _ONE_IN

    def format_of(self, layer: int, form: Format) -> Format:
        """The format of a layer's cache in a model whose cache has that format.

        Few layers copy, and rounding them costs nearly all that copies lose. The first layers of `precise` have a format of
        their own; without a measurement, layers past five eighths of all have it, where models mostly copy.
        """
        edges = min(form.edges, self.num_layers // 2)
        if not edges <= layer < self.num_layers - edges:
            return FORMATS["bfloat16"]
        if form.precise is None or layer not in self.unbounded:
            return form
        found = self.precise or self.unbounded[len(self.unbounded) * 5 // 8 :]
        return form.precise if layer in found[: self.count_precise(form)] else form

    def grouped(self, groups: int) -> AttentionSpec:
        """The same attention with its KV heads merged into `groups`.

        Raises:
            Refusal: `groups` exceeds the KV heads or does not divide them; or there is a latent and no KV heads.
        """
        if self.kv_lora_rank is not None:
            raise Refusal(
                f"{self.kind} has a latent and no KV heads to merge", hint="convert the checkpoint that it was made from"
            )
        heads = self.num_kv_heads
        choices = [g for g in range(1, heads + 1) if heads % g == 0]
        if groups not in choices:
            rule = f"{groups} does not divide {heads}" if 0 < groups < heads else f"it must be between 1 and {heads}"
            listed = ", ".join(map(str, choices[:-1])) + (" or " if choices[1:] else "") + str(choices[-1])
            raise Refusal(f"cannot make {groups} groups from {heads} KV heads: {rule} (choose {listed})")
        return replace(self, num_kv_heads=groups)

    @property
    def key_dim(self) -> int:
        """Dims of one head's keys: D; with a latent N + P."""
        return self.head_dim if self.kv_lora_rank is None else self.qk_nope_head_dim + self.qk_rope_head_dim

    def latent(self, kv_lora_rank: int, qk_rope_head_dim: int) -> AttentionSpec:
        """The same attention with a latent of R values and a rotary key of P in place of keys and values.

        Rotary dims that are given up become nope dims, so that a head's queries keep all of their dims. P is 0 where nothing
        rotates.

        Raises:
            Refusal: P is odd, negative or more than the dims of the keys; R is below 1; or there is a latent already.
        """
        if self.kv_lora_rank is not None:
            raise Refusal(f"{self.kind} is a latent already", hint="convert the checkpoint that it was made from")
        most = self.num_kv_heads * self.head_dim
        if qk_rope_head_dim < 0 or qk_rope_head_dim % 2 or qk_rope_head_dim > most:
            heads = f"{self.num_kv_heads} KV heads × {self.head_dim}"
            raise Refusal(f"cannot keep {qk_rope_head_dim} rotary dims of {heads}: it must be even and between 2 and {most}")
        if kv_lora_rank < 1:
            raise Refusal(f"a latent of rank {kv_lora_rank} holds nothing: it must be at least 1")
        return replace(
            self,
            num_kv_heads=self.num_heads,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            qk_nope_head_dim=self.head_dim,
        )

    @property
    def values_per_token(self) -> int:
        """Values that the KV cache holds per token in all layers: a key and a value of D per KV head, or R + P."""
        return self._bytes("float64", [1] * self.num_layers) // dtype_bytes("float64")

    def tokens_held(self, context: int, static: bool = False) -> list[int]:
        """How many of the tokens of a sequence the cache of each layer holds.

        A layer with a window of W keeps the W - 1 tokens that the next token reads beside itself.

        Args:
            context: The tokens of the sequence.
            static: Whether the cache is one of fixed size, in which the next token has its place, too.
        """
        windows = self.windows or [None] * self.num_layers
        return [context if window is None else min(context, window - (not static)) for window in windows]

    def is_cut(self, context: int) -> bool:
        """Whether windows keep some of so many tokens out of the cache: bytes per token then depend on the context."""
        return min(self.tokens_held(context)) < context

    def at_context(self, context: int) -> str:
        """What to say beside bytes per token: " at 32,768 tokens" where they depend on the context, and "" where not."""
        return f" at {context:,} tokens" if self.is_cut(context) else ""

    def window_note(self, context: int) -> str | None:
        """What share of the cache of so many tokens layers with windows hold; None if no window is shorter."""
        if not self.is_cut(context):
            return None
        windows, held = self.windows or (), self.tokens_held(context)
        within = [tokens if window else 0 for tokens, window in zip(held, windows, strict=True)]
        share = self._bytes("float64", within) / self._bytes("float64", held)
        lengths = " or ".join(f"{window:,}" for window in sorted({window for window in windows if window}))
        layers = f"{sum(map(bool, windows))} of {self.num_layers}"
        return f"the windowed layers ({layers}, which see {lengths} tokens) are {share:.1%} of the cache at {context:,} tokens"

    def bytes_per_token(self, form: str, context: int | None = None) -> float:
        """Bytes that the KV cache holds per token in all layers, in that format, which a dtype is, too; an int if whole.

        Args:
            form: The name of a format, see `attention.formats`.
            context: The tokens of the sequence over which its bytes are shared out, where windows keep some of them out of the
                cache; None for a token that all layers hold.

        Raises:
            Refusal: The format is unknown, or does not take these sizes.
        """
        held = self._bytes(form, [1] * self.num_layers) if context is None else self.cache_bytes(form, context)
        whole, rest = divmod(held, context or 1)
        return held / (context or 1) if rest else whole

    def cache_bytes(self, form: str, context: int, static: bool = False) -> int:
        """Bytes that the KV cache of one sequence holds in all layers, in that format.

        Args:
            form: The name of a format, see `attention.formats`.
            context: The tokens of the sequence.
            static: As of `tokens_held`.

        Raises:
            Refusal: The format is unknown, or does not take these sizes.
        """
        return self._bytes(form, self.tokens_held(context, static))

    def kept_bytes(self, form: str, context: int) -> int:
        """The part of `cache_bytes` that is of layers that are kept."""
        held = self.tokens_held(context)
        return self._bytes(form, [tokens if layer in self.kept else 0 for layer, tokens in enumerate(held)])

    def _bytes(self, form: str, held: Sequence[int]) -> int:
        """Bytes of so many tokens in each layer: the formula."""
        stored, total = format_named(form), 0
        if self.kv_lora_rank is not None:
            stored.require("latent", self.kv_lora_rank)
            stored.require("RoPE key", self.qk_rope_head_dim)
        if self.kv_lora_rank is None or self.kept:
            (stored if self.kv_lora_rank is None else stored.of("keys")).require("head", self.head_dim)
        for layer, tokens in enumerate(held):
            own, heads = self.format_of(layer, stored), self.kept_kv_heads if layer in self.kept else self.num_kv_heads
            if self.is_latent(layer):
                row = own.row_bytes(self.kv_lora_rank or 0, "latent") + own.row_bytes(self.qk_rope_head_dim, "rope")
            else:
                row = heads * (own.row_bytes(self.head_dim, "keys") + own.row_bytes(self.head_dim, "values"))
            total += row * tokens
        return total

    def takes(self, form: str) -> bool:
        """Whether a cache of these sizes can be stored in that format."""
        try:
            self.bytes_per_token(form)
        except Refusal:
            return False
        return True
