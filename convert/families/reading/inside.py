"""A decoder inside another model, such as one that sees: its family, at another path, with a part of the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from convert.families.base import Family, Traits
from convert.families.names import NameTable

if TYPE_CHECKING:
    import torch

    from attention.record import Record
    from attention.rope import Rotary
    from attention.scoring import Scoring
    from attention.spec import AttentionSpec

_LAYERS = ".layers."


def has_other_models(config: Any) -> bool:
    """Whether a config describes models besides its decoder, such as one that sees."""
    from transformers import PreTrainedConfig

    return decoder_of(config) is not config or any(isinstance(part, PreTrainedConfig) for part in vars(config).values())


class Inside(Family):
    """The family of a decoder whose modules are at another path, in a model whose config has the decoder's as a part.

    Args:
        inner: The decoder's family.
        path: The path of the decoder in the model, in place of the one that `inner` has it at.
        model_type: Of the model.
    """

    keeps_names = True
    in_engines = False

    def __init__(self, inner: Family, path: str, model_type: str) -> None:
        self.inner, self.path, self.model_type = inner, path, model_type
        root = inner.attention_path.partition(_LAYERS)[0]

        def moved(name: str) -> str:
            return path + name.removeprefix(root) if name.startswith(f"{root}.") else name

        self.attention_path = moved(inner.attention_path)
        self.names = NameTable([replace(row, path=moved(row.path)) for row in inner.names.rows])
        self.layout, self.rope_stride, self.scales_rope = inner.layout, inner.rope_stride, inner.scales_rope
        self.restarts_cache, self.has_heads, self.shares_heads = inner.restarts_cache, inner.has_heads, inner.shares_heads
        self.computed = inner.computed

    def holding(self, inner: Family) -> Inside:
        """The same model with another decoder at that path."""
        return Inside(inner, self.path, self.model_type)

    @property
    def without_latent(self) -> str | None:
        return self.inner.without_latent

    def for_config(self, config: Any) -> Family:
        return self.holding(self.inner.for_config(decoder_of(config)))

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        return self._moved(self.inner.shapes(decoder_of(config), layer), layer)

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Record:
        ours, theirs = self.module(layer), self.inner.module(layer)
        return self.inner.split({theirs + name.removeprefix(ours): t for name, t in tensors.items()}, decoder_of(config), layer)

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        return self._moved(self.inner.join(record, spec, layer), layer)

    def _moved(self, tensors: Mapping[str, Any], layer: int) -> dict[str, Any]:
        ours, theirs = self.module(layer), self.inner.module(layer)
        return {ours + name.removeprefix(theirs): tensor for name, tensor in tensors.items()}

    def output(self, layer: int) -> str:
        return self.module(layer) + self.inner.output(layer).removeprefix(self.inner.module(layer))

    def unreadable(self, config: Any) -> str | None:
        return self.inner.unreadable(decoder_of(config))

    def unshared(self, config: Any, spec: AttentionSpec) -> str | None:
        return self.inner.unshared(decoder_of(config), spec)

    def class_kv_heads(self, config: Any) -> int:
        return self.inner.class_kv_heads(decoder_of(config))

    def sharing(self, config: Any, spec: AttentionSpec) -> dict[str, Any]:
        return self.inner.sharing(decoder_of(config), spec)

    def traits(self, config: Any) -> Traits:
        return self.inner.traits(decoder_of(config))

    def rotary(self, config: Any, layer: int) -> Rotary | None:
        return self.inner.rotary(decoder_of(config), layer)

    def inner_window(self, config: Any, layer: int) -> int | None:
        return self.inner.inner_window(decoder_of(config), layer)

    def scale(self, config: Any) -> float:
        return self.inner.scale(decoder_of(config))

    def slopes(self, config: Any) -> tuple[float, ...] | None:
        return self.inner.slopes(decoder_of(config))

    def window(self, config: Any, layer: int) -> int | None:
        return self.inner.window(decoder_of(config), layer)

    def scoring(self, config: Any, layer: int) -> Scoring:
        return self.inner.scoring(decoder_of(config), layer)

    def latent_dims(self, config: Any, rope_dim: int) -> int:
        return self.inner.latent_dims(decoder_of(config), rope_dim)

    def merges_norm_gains(self, config: Any) -> bool:
        return self.inner.merges_norm_gains(decoder_of(config))


def decoder_of(config: Any) -> Any:
    """The part of a model's config that describes its decoder."""
    return config.get_text_config(decoder=True)
