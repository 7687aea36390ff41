"""Which latents a source can have in an output class: ranks and rotary dims, from the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convert.planning.budget import split_budget

if TYPE_CHECKING:
    from attention.spec import AttentionSpec
    from convert.families import Family
    from convert.hosts import Host
    from eval.inputs.source import Source


def smallest_latent(source: Source, family: Family, before: AttentionSpec) -> AttentionSpec:
    """The smallest latent that the source's attention can become, to ask an output class whether it carries any."""
    return before.latent(1, min(2, rotary_dim(family, source)))


def full_rank(source: Source, family: Family, rope_dim: int) -> int:
    """The rank beyond which nothing is gained: nope dims of keys plus dims of values, or the model's width if that is less.

    Keys and values behind QK-norm or a clamp are not linear in the layer's input, so its width does not bound them.
    """
    dims = family.latent_dims(source.config, rope_dim)
    return dims if family.needs_projections(source.config) else min(source.decoder.hidden_size, dims)


def with_reserved(host: Host, channels: int) -> int:
    """The smallest rank that leaves `channels` besides those that the output class reserves."""
    return next(rank for rank in range(channels, channels + 9) if rank - host.reserved(rank) >= channels)


def latent_for_budget(source: Source, family: Family, before: AttentionSpec, host: Host, values: int) -> tuple[int, int]:
    """Rank and rotary dims for `values` cached values per layer and token (see `budget.split_budget`)."""
    return split_budget(
        values,
        rotary_dim(family, source),
        rotary_keys(before, host),
        lambda rope_dim: with_reserved(host, full_rank(source, family, rope_dim)),
        with_reserved(host, 1),
    )


def most_rotary_dims(source: Source, family: Family, before: AttentionSpec, host: Host) -> int:
    """The most rotary dims that a latent can keep: those that have RoPE, of all different keys; of one on a ladder."""
    return min(before.most_rotary_dims, rotary_keys(before, host) * rotary_dim(family, source))


def rotary_keys(before: AttentionSpec, host: Host) -> int:
    """How many keys may keep one frequency."""
    return 1 if host.portable else before.rotary_keys


def rotary_dim(family: Family, source: Source) -> int:
    """Rotary dims of one head in layers with RoPE; 0 if there are none."""
    rotaries = (family.rotary(source.config, layer) for layer in range(source.decoder.num_hidden_layers))
    return next((rotary.dims for rotary in rotaries if rotary), 0)
