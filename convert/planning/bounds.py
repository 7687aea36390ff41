"""Which latents a source can have in an output class: ranks and rotary dims, from the config."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from convert.planning.budget import split_budget

if TYPE_CHECKING:
    from attention.spec import AttentionSpec
    from convert.families import Family
    from convert.hosts import Host
    from eval.inputs.source import Source


@dataclass(frozen=True)
class LatentBounds:
    """What bounds the latents of a source.

    Attributes:
        source: The checkpoint.
        family: Its family.
        host: The output class.
    """

    source: Source
    family: Family
    host: Host

    @cached_property
    def before(self) -> AttentionSpec:
        """The source's attention."""
        return self.family.spec

    @cached_property
    def rotary_dim(self) -> int:
        """Rotary dims of one head in layers with RoPE; 0 if there are none."""
        return _rotary_dim(self.family)

    @property
    def rotary_keys(self) -> int:
        """How many keys may keep one frequency."""
        return 1 if self.host.portable else self.before.rotary_keys

    @property
    def most_rotary_dims(self) -> int:
        """The most rotary dims that a latent can keep: those that have RoPE, of all different keys; of one on a ladder."""
        return min(self.before.most_rotary_dims, self.rotary_keys * self.rotary_dim)

    def full_rank(self, rope_dim: int) -> int:
        """The rank beyond which nothing is gained: nope dims of keys plus dims of values, or the model's width if that is less.

        Keys and values behind QK-norm or a clamp are not linear in the layer's input, so its width does not bound them.
        """
        dims = self.family.latent_dims(rope_dim)
        if self.family.needs_projections:
            return dims
        return min(self.source.decoder.hidden_size, dims)

    def with_reserved(self, channels: int) -> int:
        """The smallest rank that leaves `channels` besides those that the output class reserves."""
        return next(rank for rank in range(channels, channels + 9) if rank - self.host.reserved(rank) >= channels)

    def for_budget(self, values: int, folds: bool = False) -> tuple[int, int]:
        """Rank and rotary dims for `values` cached values per layer and token (see `budget.split_budget`)."""
        return split_budget(
            values,
            values * self.before.num_layers / self.before.values_per_token,
            self.rotary_dim,
            self.rotary_keys,
            lambda rope_dim: self.with_reserved(self.full_rank(rope_dim)),
            self.with_reserved(1),
            folds or self.host.portable,
        )


def smallest_latent(family: Family) -> AttentionSpec:
    """The smallest latent that the source's attention can become, to ask an output class whether it carries any."""
    return family.spec.latent(1, min(2, _rotary_dim(family)))


def _rotary_dim(family: Family) -> int:
    rotary = family.first_rotary
    return rotary.dims if rotary else 0
