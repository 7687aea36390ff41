"""The targets that a plan converts to, and what a text chooses for one.

Each has its recipe and its facts; `convert.execute.layer` changes layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert.hosts import Host
from convert.methods.grouped import GroupedMethod
from convert.methods.latent import Allocation, LatentMethod

if TYPE_CHECKING:
    from attention.formats import Format
    from attention.rope import Rotary
    from convert.families import Family


@dataclass(frozen=True)
class GroupedTarget:
    """A target with fewer KV heads: GQA or MQA.

    Attributes:
        command: The command that makes it.
        options: The options of that command, besides the method.
        before: The source's sizes.
        spec: The result's sizes.
        method: The method that merges the heads of a group.
        host: The class that carries the result.
        notes: Notes for the user.
        cache_dtype: The format of the cache that the result is for; None for the dtype of its weights.
    """

    command: str
    options: dict[str, Any]
    before: AttentionSpec
    spec: AttentionSpec
    method: GroupedMethod
    host: Host
    notes: tuple[str, ...] = ()
    cache_dtype: str | None = None

    @property
    def copies(self) -> bool:
        """Whether nothing changes."""
        return self.spec == self.before and self.rounding is None

    @property
    def rounding(self) -> Format | None:
        """The format through whose rounding keys and values are made fit; None for a dtype."""
        return rounding_of(self.cache_dtype)

    def recipe(self) -> dict[str, Any]:
        """The target's options, as on the command line."""
        return self.options | _of_cache(self.cache_dtype)

    def facts(self) -> dict[str, Any]:
        """The sizes of the result, for `--json`."""
        return {"kv_heads_after": self.spec.num_kv_heads}

    def config(self, raw: Mapping[str, Any], family: Family, spec: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        """The new config.json, as of `Host.config`."""
        return self.host.config(raw, family, spec, rotary)

    def layer_steps(self, refit: bool) -> tuple[str, ...]:
        """As of `LatentTarget`."""
        steps = {"balance": self.rounding is not None, "refit": refit}
        return tuple(name for name, taken in steps.items() if taken)


@dataclass(frozen=True)
class LatentTarget:
    """A target with a latent and a rotary key: MLA.

    Attributes:
        before: The source's sizes.
        spec: The result's sizes.
        method: The method that factors keys and values.
        host: The class that carries the result.
        channels: Channels of the latent that carry keys and values.
        freqfold: How many neighbouring frequencies count as one.
        pad_rank: Whether channels beyond full rank were asked for.
        ranks: The ranks among which the text chooses one for each layer. Empty if all layers have one rank.
        notes: Notes for the user.
        cache_dtype: As of `GroupedTarget`.
    """

    before: AttentionSpec
    spec: AttentionSpec
    method: LatentMethod
    host: Host
    channels: int
    freqfold: int = 1
    pad_rank: bool = False
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    cache_dtype: str | None = None

    command = "mla"

    @property
    def copies(self) -> bool:
        """Whether nothing changes."""
        return self.spec == self.before

    @property
    def rounding(self) -> Format | None:
        """As of `GroupedTarget`."""
        return rounding_of(self.cache_dtype)

    def recipe(self) -> dict[str, Any]:
        """The target's options, as on the command line."""
        return {
            "kv_lora_rank": self.spec.kv_lora_rank,
            "qk_rope_head_dim": self.spec.qk_rope_head_dim,
            **({"pad_rank": True} if self.pad_rank else {}),
            **({"portable": True} if self.host.portable else {}),
            **({"per_layer_ranks": True} if self.ranks else {}),
            **_of_cache(self.cache_dtype),
        }

    def facts(self) -> dict[str, Any]:
        """The sizes of the result, for `--json`."""
        return {**self.recipe(), "latent_channels": self.channels}

    def config(self, raw: Mapping[str, Any], family: Family, spec: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        """As of `GroupedTarget`; `rotary` is the rotary embedding of its RoPE key."""
        return dict(raw) if self.copies else self.host.config(raw, family, spec, rotary)

    def layer_steps(self, refit: bool) -> tuple[str, ...]:
        """The steps that follow the method in each layer, in order, by name.

        Args:
            refit: Whether queries, keys and values are fitted to a text.
        """
        steps = {
            "constant norm": self.host.portable,
            "balance": self.rounding is not None,
            "refit": refit,
            "queries behind a norm": self.spec.q_lora_rank is not None,
            "scale": True,
        }
        return tuple(name for name, taken in steps.items() if taken)

    def allocation(self, rotary: Rotary) -> Allocation:
        """The allocation of all layers before frequencies are chosen; `rotary` is the source's rotary embedding."""
        return Allocation(
            self.channels,
            (),
            self.freqfold,
            rotary,
            nope_dims=self.spec.qk_nope_head_dim,
            rotary_keys=self.before.rotary_keys,
            ladder=self.host.portable,
        )


@dataclass(frozen=True)
class Choice:
    """What the text has chosen for a latent.

    Attributes:
        pairs: The frequencies that stay rotary.
        ranks: The rank of each layer; empty if all have one.
    """

    pairs: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def rotary(self, of: Rotary) -> Rotary:
        """The rotary embedding of the RoPE key; `of` is the source's."""
        return of.select(self.pairs, "interleaved")

    def allocation(self, target: LatentTarget, rotary: Rotary, layer: int) -> Allocation:
        """What a method factors a layer to; `rotary` is the source's rotary embedding."""
        allocation = replace(target.allocation(rotary), pairs=self.pairs)
        return replace(allocation, rank=self.ranks[layer]) if self.ranks else allocation

    def facts(self) -> dict[str, Any]:
        """The entries of conversion.json for a latent."""
        ranks = {"kv_lora_ranks": list(self.ranks)} if self.ranks else {}
        return {"rotary_frequencies": list(self.pairs), **ranks}


Target = GroupedTarget | LatentTarget


def _of_cache(cache_dtype: str | None) -> dict[str, Any]:
    return {} if cache_dtype is None else {"cache_dtype": cache_dtype}
