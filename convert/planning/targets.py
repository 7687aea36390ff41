"""The targets that a plan converts to, and what a text chooses for one.

Each has its recipe and its facts; `convert.execute.job` changes layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attention.formats import rounding_of
from attention.spec import AttentionSpec
from convert.hosts import Host
from convert.methods.grouped import GroupedMethod
from convert.methods.latent import Allocation, LatentMethod
from convert.methods.text import Method

if TYPE_CHECKING:
    from attention.formats import Format
    from attention.rope import Rotary


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What all targets have.

    Attributes:
        before: The source's sizes.
        spec: The result's sizes.
        method: The method that makes it.
        host: The class that carries the result.
        notes: Notes for the user.
        cache_dtype: The format of the cache that the result is for; None for the dtype of its weights.
    """

    before: AttentionSpec
    spec: AttentionSpec
    method: Method
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


@dataclass(frozen=True, kw_only=True)
class GroupedTarget(_Target):
    """A target with fewer KV heads: GQA or MQA.

    Attributes:
        command: The command that makes it.
        options: The options of that command, besides the method and the cache.
    """

    command: str
    options: dict[str, Any]
    method: GroupedMethod

    def recipe(self) -> dict[str, Any]:
        """The target's options, as on the command line."""
        return self.options | ({} if self.cache_dtype is None else {"cache_dtype": self.cache_dtype})

    def facts(self) -> dict[str, Any]:
        """The sizes of the result, for `--json`."""
        return {"kv_heads_after": self.spec.num_kv_heads}


@dataclass(frozen=True, kw_only=True)
class LatentTarget(_Target):
    """A target with a latent and a rotary key: MLA.

    Attributes:
        channels: Channels of the latent that carry keys and values.
        freqfold: How many neighbouring frequencies count as one.
        pad_rank: Whether channels beyond full rank were asked for.
    """

    method: LatentMethod
    channels: int
    freqfold: int = 1
    pad_rank: bool = False

    command = "mla"

    def recipe(self) -> dict[str, Any]:
        """The target's options, as on the command line."""
        return {
            "kv_lora_rank": self.spec.kv_lora_rank,
            "qk_rope_head_dim": self.spec.qk_rope_head_dim,
            **({"pad_rank": True} if self.pad_rank else {}),
            **({"portable": True} if self.host.portable else {}),
            **({} if self.cache_dtype is None else {"cache_dtype": self.cache_dtype}),
        }

    def facts(self) -> dict[str, Any]:
        """The sizes of the result, for `--json`."""
        return {**self.recipe(), "latent_channels": self.channels}

    def allocation(self, rotary: Rotary) -> Allocation:
        """The allocation of all layers before frequencies are chosen; `rotary` is the source's rotary embedding."""
        return Allocation(self.channels, (), self.freqfold, rotary, ladder=self.host.portable)


@dataclass(frozen=True)
class Choice:
    """What the text has chosen for a latent.

    Attributes:
        pairs: The frequencies that stay rotary.
    """

    pairs: tuple[int, ...] = ()


Target = GroupedTarget | LatentTarget
