"""The bytes of a KV cache, by the only formula (`_bytes`). All code that prints, plans or checks them uses it."""

from __future__ import annotations

from collections.abc import Sequence

from attention.errors import Refusal
from attention.formats import FORMATS, PLAIN, format_named


def dtype_bytes(dtype: str) -> int:
    """Bytes of one value of `dtype` ("float32", "float16", "bfloat16" or "float64")."""
    if dtype not in PLAIN:
        raise Refusal(f"no KV cache is kept in {dtype!r} (choose {', '.join(PLAIN)})")
    return FORMATS[dtype].bits // 8


class KVBytes:
    """What the KV cache of an attention holds; `attention.spec.AttentionSpec` has these sizes, and says what they are."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_lora_rank: int | None
    qk_rope_head_dim: int
    layer_ranks: tuple[int, ...] | None
    windows: tuple[int | None, ...] | None

    @property
    def ranks(self) -> tuple[int, ...]:
        """R of each layer; empty without a latent."""
        if self.kv_lora_rank is None:
            return ()
        return self.layer_ranks or (self.kv_lora_rank,) * self.num_layers

    @property
    def values_per_token(self) -> int:
        """Values that the KV cache holds per token in all layers: a key and a value of D per KV head, or R + P."""
        if self.kv_lora_rank is not None:
            return sum(self.ranks) + self.num_layers * self.qk_rope_head_dim
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

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
        rows = [rank + self.qk_rope_head_dim for rank in self.ranks] or [1] * self.num_layers
        sizes = [tokens * row for tokens, row in zip(held, rows, strict=True)]
        share = sum(size for size, window in zip(sizes, windows, strict=True) if window) / sum(sizes)
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
            Refusal: There is no such format, or it does not take these sizes.
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
            Refusal: There is no such format, or it does not take these sizes.
        """
        return self._bytes(form, self.tokens_held(context, static))

    def _bytes(self, form: str, held: Sequence[int]) -> int:
        """Bytes of so many tokens in each layer: the formula."""
        stored = format_named(form)
        if self.kv_lora_rank is None:
            stored.require("head", self.head_dim)
            row = stored.row_bytes(self.head_dim, "keys") + stored.row_bytes(self.head_dim, "values")
            return self.num_kv_heads * sum(held) * row
        stored.require("latent", *self.ranks)
        stored.require("RoPE key", self.qk_rope_head_dim)
        rope = stored.row_bytes(self.qk_rope_head_dim, "rope")
        rows = [stored.row_bytes(rank, "latent") + rope for rank in self.ranks]
        return sum(tokens * row for tokens, row in zip(held, rows, strict=True))

    def takes(self, form: str) -> bool:
        """Whether a cache of these sizes can be stored in that format."""
        try:
            self.bytes_per_token(form)
        except Refusal:
            return False
        return True
