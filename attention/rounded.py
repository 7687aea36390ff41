"""A cache for one forward pass over whole texts, whose queries read what a format keeps: for training, fits and evaluations.

Of keys that are grouped along time (KIVI), all full groups are rounded, also that of the query. A real cache of such keys has
those of its newest tokens, less than a group, in full precision until the group is full.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from attention.encoded_forward import require_cache
from attention.encoding import rounded
from attention.errors import Refusal
from attention.formats import Format, format_named, parts_of
from attention.spec import AttentionSpec
from attention.versions import CACHE


class RoundedLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of one layer: what comes in is read rounded, and not kept."""

    def __init__(self, form: Format, latent: bool) -> None:
        super().__init__()
        self.form, self.latent, self.is_read = form, latent, False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of heads, or a latent and its RoPE key, `[B, heads, T, n]` each, as they are read; differentiable."""
        self.is_read = True
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


def read_rounded(model: Any, name: str) -> Any:
    """Make `model` read keys and values of whole texts, each in one pass, as a format rounds them.

    Args:
        model: A transformers model that decodes from a cache. From here on, its forward refuses padding and a cache.
        name: The name of a format, see `attention.formats`.

    Returns:
        `model` itself.

    Raises:
        Refusal: There is no such format, or the model does not cache keys and values of all its layers.
    """
    form = format_named(name)
    require_cache(model, form)
    spec, stock = AttentionSpec.from_config(model.config), model.forward

    @functools.wraps(stock)
    def forward(*args: Any, **given: Any) -> Any:
        mask = given.get("attention_mask")
        held = given.get(CACHE) if CACHE in given else given.get("past_key_values")
        if held is not None or (mask is not None and not bool(mask.all())):
            raise Refusal(f"{form.name} rounds whole texts: it takes no cache and no padding", hint="give one text at a time")
        cache = rounding_cache(form, spec)
        output = stock(*args, **given | {CACHE: cache, "use_cache": True})
        if not any(layer.is_read for layer in cache.layers):
            raise Refusal(f"{type(model).__name__} does not read its keys and values from the cache that it is given")
        output[CACHE] = None
        return output

    model.forward = forward
    return model
