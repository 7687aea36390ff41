"""Splits a KV budget into a format, rank and rotary dims, folds frequencies, and bounds the latents of a source by its config.

Rotary dims and formats were chosen on a model of 135M parameters (docs/notes/fits.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from attention.errors import Refusal
from attention.spec import RANK_STEP

if TYPE_CHECKING:
    from attention.spec import AttentionSpec
    from convert.families import Family
    from convert.hosts import Host
    from eval.inputs.source import Source

# The share of the source's rotary dims that rotate in a result with as many values as its source; less by the share of values.
ROTARY, ROTARY_MIXED2 = 0.75, 0.6  # where a rotary value takes twice the bits of another
# By the least share of the source's cache in bytes: the formats of `--cache-dtype auto`; the first that is stored counts.
FORMATS = ((0.4, ("int8", "q8_0")), (0.16, ("int4", "q4_0")), (0.13, ("mixed", "q4_0")), (0.0, ("mixed2", "q4_0")))
_GIVEN_UP = 0.05  # the share of a budget that a rank may give up so that the CUDA kernel serves it


def fold_of(rope_dim: int, rotary_dim: int) -> int:
    """The fewest neighbouring frequencies that must count as one so that P dims spread evenly over D; both are even."""
    return rotary_dim // math.gcd(rotary_dim, rope_dim)


def format_of(share: float, stored: Container[str]) -> str | None:
    """The format of `--cache-dtype auto` for a share of the source's cache, by `FORMATS`; None if none of them is stored.

    Args:
        share: The bytes of the result's cache over those of the source's.
        stored: The formats that may be chosen.
    """
    formats = next(formats for above, formats in FORMATS if share >= above)
    return next((form for form in formats if form in stored), None)


def rule_text() -> str:
    """What a budget is split by, for `plan`."""
    formats = [f"{formats[0]} {f'from {100 * above:g}% on' if above else 'below'}" for above, formats in FORMATS]
    return (
        f"--kv-budget keeps {ROTARY:.0%} (mixed2: {ROTARY_MIXED2:.0%}) of all rotary dims times the share of numbers.\n"
        f"--cache-dtype auto, by the share of its bytes, is {', '.join(formats)}."
    )


@dataclass(frozen=True)
class LatentBounds:
    """What bounds the latents of a source.

    Attributes:
        source: The checkpoint.
        family: Its family.
        host: The output class.
        kept: The layers that stay as they are.
    """

    source: Source
    family: Family
    host: Host
    kept: tuple[int, ...] = ()

    @cached_property
    def before(self) -> AttentionSpec:
        """The source's attention."""
        return self.family.spec

    @cached_property
    def rotary_dim(self) -> int:
        """Rotary dims of one head in layers with RoPE that do not stay; 0 if there are none."""
        return _rotary_dim(self.family, self.kept)

    @property
    def rotary_keys(self) -> int:
        """How many keys may keep one frequency."""
        return 1 if self.host.portable else self.before.num_kv_heads

    @property
    def most_rotary_dims(self) -> int:
        """The most rotary dims that a latent can keep: those that have RoPE, of all different keys; of one on a ladder."""
        return self.rotary_keys * self.rotary_dim

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

    def for_budget(self, values: int, folds: bool = False, rotates: float = ROTARY) -> tuple[int, int]:
        """Split a number of cached values per layer and token into rank and rotary dims.

        A part of the rotary dims of all KV heads rotates, times the share of the source's values. Where frequencies have to
        spread evenly over those of a head, because a method folds them or they are a ladder, it is at most a quarter of the
        values, rounded to a power-of-two share of one head's rotary dims. Values beyond full rank become rotary, too.

        Args:
            values: R + P, at most.
            folds: Whether the method folds frequencies.
            rotates: The part of rotary dims.

        Returns:
            `(R, P)`.

        Raises:
            Refusal: No rank fits.
        """
        rotary_dim, least = self.rotary_dim, self.with_reserved(1)
        key = min(2, rotary_dim)
        if values < least + key:
            raise Refusal(
                f"the budget leaves {values} values per layer and token; a latent needs at least {least}, its rotary key {key}"
            )
        most = min(self.rotary_keys * rotary_dim, (values - least) // 2 * 2)
        if folds or self.host.portable:
            rope_dim = rotary_dim
            while rope_dim > 2 and (rope_dim > values / 4 or values - rope_dim < least):
                rope_dim = rope_dim // 2 if rope_dim % 4 == 0 else 2
        else:
            share = values * self.before.num_layers / self.before.values_per_token
            wanted = rotates * share * self.rotary_keys * rotary_dim
            step = 16 if wanted >= 32 else 8 if wanted >= 16 else 2
            rope_dim = min(most, max(key, int(wanted / step) * step))
        while rope_dim < most and values - rope_dim > self.with_reserved(self.full_rank(rope_dim)):
            rope_dim = min(most, rope_dim + min(rope_dim, rotary_dim))
        rank, full = values - rope_dim, self.with_reserved(self.full_rank(rope_dim))
        if rank >= full:  # which loses nothing
            return full, rope_dim
        # Rounded down to a multiple of 16, if that gives up at most 5 %: a few thousandths in a large model.
        over = rank % RANK_STEP if rank > RANK_STEP else 0
        return (rank - over if over <= _GIVEN_UP * values else rank), rope_dim


def smallest_latent(family: Family, kept: Collection[int] = ()) -> AttentionSpec:
    """The smallest latent that the attention of layers can become which do not stay, to ask an output class whether it carries
    any.
    """
    return family.spec.latent(1, min(2, _rotary_dim(family, kept)))


def _rotary_dim(family: Family, kept: Collection[int]) -> int:
    return next((rotary.dims for layer, rotary in enumerate(family.rotaries) if rotary and layer not in kept), 0)
