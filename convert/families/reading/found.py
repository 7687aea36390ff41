"""The family of a model type that has no row, as experiments find it (`convert.families.reading.experiments`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attention import rope
from attention.record import Attention, Record
from attention.scoring import Scoring
from attention.spec import AttentionSpec
from convert.families.base import SOFTCAP, InputNorm, Traits
from convert.families.reading.twin import kinds
from convert.families.stacked import PARTS, StackedProjections

_NAMES = (*PARTS, "o_proj")


@dataclass(frozen=True)
class Reading:
    """What a kind of layer computes.

    Attributes:
        pairing: Of its RoPE; None without.
        partial: As in `attention.rope.from_config`.
        backwards: Whether pairs turn by negative angles.
        window: The config field that says how many tokens it sees; None if it sees all.
        cap: Whether its logits are capped at `attn_logit_softcapping`.
        scale: Of its logits.
    """

    pairing: rope.Pairing | None = None
    partial: bool = False
    backwards: bool = False
    window: str | None = None
    cap: bool = False
    scale: float = 1.0

    def rotary(self, config: Any, head_dim: int, layer: int) -> rope.Rotary | None:
        if self.pairing is None:
            return None
        types = getattr(config, "layer_types", None)
        found = rope.from_config(config, head_dim, self.pairing, types[layer] if types else None, self.partial)
        return found.backwards if self.backwards else found

    def scoring(self, config: Any) -> Scoring:
        window = None if self.window is None else int(getattr(config, self.window))
        return Scoring(None, window, getattr(config, SOFTCAP) if self.cap else None)


@dataclass(frozen=True)
class Found(StackedProjections):
    """A family that experiments have found for one config, and for what becomes of it.

    Attributes:
        projections: The names of the projections of queries, keys, values and outputs in the attention's module.
        lists: The names of the config's lists that have an entry for each layer.
        readings: What each kind of layer computes (`convert.families.reading.twin.kinds`).
        input: The norm of the attention's input, with `{layer}` in its name; None without one.
        far_queries: What the queries of the last positions are multiplied by, which no record says; None for nothing.
        sinks: The name behind the attention's path of a tensor `[H]`, the sinks of its heads; None without.
    """

    qkv_name: str = ""
    projections: tuple[str, ...] = _NAMES
    lists: tuple[str, ...] = ()
    readings: tuple[tuple[tuple[Any, ...], Reading], ...] = ()
    input: InputNorm | None = None
    far_queries: float | None = None
    sinks: str | None = None
    keeps_names: bool = True
    in_engines: bool = False

    @property
    def traits(self) -> Traits:
        rotated = sum(self.reading(layer).pairing is not None for layer in range(self.spec.num_layers))
        traits = replace(super().traits, layers_with_rotary=rotated, sinks=self.sinks is not None)
        if self.far_queries is None:
            return traits
        return replace(traits, extra_features={**traits.extra_features, "far queries times": round(self.far_queries, 2)})

    def reading(self, layer: int) -> Reading:
        return dict(self.readings)[kinds(self.config, self.lists)[layer]]

    def rotary(self, layer: int) -> rope.Rotary | None:
        return self.reading(layer).rotary(self.decoder, self.spec.head_dim, layer)

    def window(self, layer: int) -> int | None:
        return self.scoring(layer).window

    def scoring(self, layer: int) -> Scoring:
        return self.reading(layer).scoring(self.decoder)

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        shapes = self._renamed(super().shapes(layer), layer, _NAMES, self.projections)
        return shapes if self.sinks is None else shapes | {self._of_sinks(layer): (self.spec.num_heads,)}

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> Attention:
        own = {name: tensor for name, tensor in tensors.items() if self.sinks is None or name != self._of_sinks(layer)}
        record = super().split(self._renamed(own, layer, self.projections, _NAMES), layer)
        return record if self.sinks is None else replace(record, sinks=tensors[self._of_sinks(layer)])

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        assert isinstance(record, Attention), "a latent has no projections of keys and values"
        assert (record.sinks is None) == (self.sinks is None), "the class has sinks, or it has none"
        tensors = self._renamed(super().join(replace(record, sinks=None), spec, layer), layer, _NAMES, self.projections)
        return tensors if record.sinks is None else tensors | {self._of_sinks(layer): record.sinks}

    def _of_sinks(self, layer: int) -> str:
        return f"{self.module(layer)}.{self.sinks}"

    def output(self, layer: int) -> str:
        return f"{self._prefix(layer)}{self.projections[-1]}"

    def input_norm(self, layer: int) -> InputNorm | None:
        return self.input and replace(self.input, name=self.input.name.format(layer=layer))

    def _renamed(self, tensors: Mapping[str, Any], layer: int, old: Sequence[str], new: Sequence[str]) -> dict[str, Any]:
        prefix = self._prefix(layer)
        names = {prefix + before: prefix + after for before, after in zip(old, new, strict=True)}
        parted = ((*name.rpartition("."), tensor) for name, tensor in tensors.items())
        return {f"{names.get(module, module)}.{last}": tensor for module, _, last, tensor in parted}
