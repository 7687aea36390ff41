"""A cache for one forward pass over whole texts, whose queries read what a format keeps: for training and for fits."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from attention.encoding import rounded
from attention.formats import Format, parts_of
from attention.spec import AttentionSpec


class RoundedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer: what comes in is read rounded, and not kept."""

    def __init__(self, form: Format, latent: bool) -> None:
        super().__init__()
        self.form, self.latent = form, latent

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of heads, or a latent and its RoPE key, `[B, heads, T, n]` each, as they are read; differentiable."""
        first, second = parts_of(self.latent)
        return rounded(key_states, self.form, first), rounded(value_states, self.form, second)

    def get_seq_length(self) -> int:
        return 0


def rounding_cache(form: Format, spec: AttentionSpec) -> DynamicCache:
    """The cache of a model with that attention, for texts that begin with the pass."""
    cache = DynamicCache()
    cache.layers = [RoundedLayer(form, spec.kv_lora_rank is not None) for _ in range(spec.num_layers)]
    cache.layer_class_to_replicate = None
    return cache
