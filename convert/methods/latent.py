"""The base of all methods that make a latent: keys split into rotary components, and one latent for the rest.

Complex view of RoPE: number l of KV head g is z_{g,l} = w_{g,l}·x, and RoPE multiplies it by e^{iθ_l t}. A basis that mixes
heads within one frequency commutes with that, so that a component y rotates as one number for all heads; the queries absorb
the mixing. The decoupled rotary key of MLA (DeepSeek-V2, arXiv 2405.04434) is a few such components. All other
components lose their rotation and share a latent with the values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from attention.record import Attention, FactoredAttention
from attention.rope import Rotary
from convert.methods.algebra import augmented, fix_signs, leading_subspace
from convert.methods.statistics import Statistics
from convert.methods.text import Method


@dataclass(frozen=True)
class Allocation:
    """The target of each layer; the same for all layers.

    Attributes:
        rank: Channels of the latent that carry keys and values (constants and padding excluded).
        pairs: For each of the P/2 rotary pairs, the number of the source's frequency that it rotates with.
        freqfold: How many neighbouring frequencies count as one.
        rotary: The model's rotary embedding, for layers that have none themselves.
        ladder: Whether the frequencies have to be a geometric ladder (`convert.methods.frequencies.pairs_on_ladder`).
    """

    rank: int
    pairs: tuple[int, ...]
    freqfold: int = 1
    rotary: Rotary | None = None
    ladder: bool = False


@dataclass(frozen=True)
class LatentMethod(Method):
    """The registry entry of a method that makes a latent.

    Attributes:
        folds: Whether it can count neighbouring frequencies as one (`Allocation.freqfold`).
        measure: `(attention, statistics) -> [L, G]`, what not rotating each component costs a layer with RoPE; or None.
        allocate: `(results of measure, P/2, allocation without pairs) -> pairs`.
        factor: `(attention, allocation, statistics) -> latent attention`.
        rotating: `(attention, statistics) -> (pairs -> latent attention)`, in which nothing but the rotation of other
            frequencies is lost, to try choices of them; or None.
    """

    folds: bool
    measure: Callable[[Attention, Statistics], torch.Tensor] | None
    allocate: Callable[[list[torch.Tensor], int, Allocation], tuple[int, ...]]
    factor: Callable[[Attention, Allocation, Statistics], FactoredAttention]
    rotating: Callable[[Attention, Statistics], Callable[[Sequence[int]], FactoredAttention]] | None = None


def keys_of(attention: Attention, fold: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of a record with their biases, fp32, times a² where RoPE has an attention factor a.

    Returns:
        Complex numbers in bands of F neighbouring frequencies, G F rows (KV head, frequency) a band, `[bands, G F, E + 1]`; and
        the nope dims `[G, N, E + 1]`.
    """
    rotary = rotary_of(attention)
    rows, nope = rotary.to_complex(augmented(attention.k, attention.k_bias).float())
    return rows.unflatten(1, (-1, fold)).transpose(0, 1).flatten(1, 2) * rotary.attention_factor**2, nope


class RopePart(NamedTuple):
    """The rotary part of a latent attention, with biases as weights of a constant input.

    Attributes:
        rotary: How the P dims rotate.
        queries: `[H, P, E + 1]`.
        key: `[P, E + 1]`.
    """

    rotary: Rotary
    queries: torch.Tensor
    key: torch.Tensor


def rotary_of(attention: Attention) -> Rotary:
    """The rotary embedding of a layer that has one."""
    assert attention.rotary is not None, "a layer without positions has no frequencies"
    return attention.rotary


def _separated(
    attention: Attention, allocation: Allocation, gram: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[RopePart, torch.Tensor, torch.Tensor]:
    """The rotary part; rows `[n, E]` of nope keys that all heads share, and the map from these to each head's, `[G, D, n]`.

    The bias of nope keys is dropped: it cancels in the softmax. Without RoPE, all keys are nope keys.
    """
    groups, dim, _ = attention.k.shape
    if attention.rotary is None:
        spread = torch.eye(groups * dim, device=attention.k.device).unflatten(0, (groups, dim))
        return no_rope_part(attention, allocation), attention.k.float().flatten(0, 1), spread
    keys, nope = keys_of(attention, allocation.freqfold)
    basis = fix_signs(torch.linalg.eigh(gram(keys)).eigenvectors.flip(-1)).to(keys.dtype)
    components = _mixed(basis.mH, keys)  # keys = basis @ components
    bands = [pair // allocation.freqfold for pair in allocation.pairs]
    parts = [bands[:i].count(band) for i, band in enumerate(bands)]  # each band gives its first components, in order
    others = torch.ones(basis.shape[:2], dtype=torch.bool)
    others[bands, parts] = False
    spread = _spread(basis, groups, allocation.freqfold)  # [G, D/2, bands, G F]
    coefficients = spread[:, :, bands, parts].repeat_interleave(len(attention.q) // groups, 0)
    queries = _mixed(coefficients.mH, attention.rotary.to_complex(augmented(attention.q, attention.q_bias).float())[0])
    kept = attention.rotary.select(allocation.pairs, "interleaved")
    rope = RopePart(kept, kept.from_complex(queries), kept.from_complex(components[bands, parts][None])[0])
    return rope, *_rest(attention.rotary, nope[..., :-1], components[others][:, :-1], spread[:, :, others])


def _mixed(mixing: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The product with rows `[…, E + 1]`; their biases are rounded as a product of their own."""
    return torch.cat((mixing @ rows[..., :-1], mixing @ rows[..., -1:]), -1)


def no_rope_part(attention: Attention, allocation: Allocation) -> RopePart:
    """The rotary part of a layer without positions: zeros."""
    assert allocation.rotary is not None
    count, zeros = 2 * len(allocation.pairs), attention.k.float().new_zeros
    queries, key = zeros(len(attention.q), count, attention.q.shape[-1] + 1), zeros(count, attention.k.shape[-1] + 1)
    return RopePart(allocation.rotary.select(allocation.pairs, "interleaved"), queries, key)


def _rest(
    rotary: Rotary, nope: torch.Tensor, components: torch.Tensor, spread: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows `[n, E]` of all nope keys, and the map from them to keys, `[G, D, n]`.

    `nope [G, N, E]` is the source's; `spread [G, D/2, m]` are coefficients of complex `components [m, E]` in numbers of heads.
    """
    groups, count = nope.shape[:2]
    # y = y' + i y'' contributes (s y', i s y'') for its coefficient s.
    numbers = torch.cat((spread, 1j * spread), -1)  # [G, D/2, 2 m]
    rotated = rotary.from_complex(numbers, numbers.real.new_zeros(groups, count, numbers.shape[-1]))
    own = torch.zeros(groups, rotated.shape[1], groups, count, dtype=rotated.dtype, device=rotated.device)
    own[:, rotary.dims :] = torch.eye(groups * count).view(groups, count, groups, count)
    return torch.cat((components.real, components.imag, nope.flatten(0, 1))), torch.cat((rotated, own.flatten(2)), -1)


def by_subspace(
    attention: Attention,
    allocation: Allocation,
    gram: Callable[[torch.Tensor], torch.Tensor],
    second: torch.Tensor | None,
    balance_of: Callable[[torch.Tensor, torch.Tensor], float] = lambda rest, values: 1.0,
) -> FactoredAttention:
    """Split keys into components, keep some of them rotary, and factor the rest and the values through the best latent.

    Args:
        attention: The record.
        allocation: What the layer is converted to.
        gram: Keys `[bands, G F, E + 1]` → `[bands, G F, G F]`, real or complex, fp64: its eigenvectors are the components,
            largest first. The first ones of each band stay rotary.
        second: `[E, E]`, the second moment of what is factored; None for the identity.
        balance_of: Nope keys `[n, E]`, values `[G D, E]` → what these keys are divided by while the latent is chosen.
    """
    rope, rest, spread = _separated(attention, allocation, gram)
    values = attention.v.float().flatten(0, 1)
    balance, repeats, count = balance_of(rest, values), len(attention.q) // attention.num_kv_heads, len(rest)
    left = leading_subspace(torch.cat((rest / balance, values)), second, allocation.rank)
    o_bias = None if attention.o_bias is None else attention.o_bias.float()
    if attention.v_bias is not None:  # probabilities sum to one, so a constant value is a constant output
        constant = torch.einsum("ehd,hd->e", attention.o.float(), attention.v_bias.float().repeat_interleave(repeats, 0))
        o_bias = constant if o_bias is None else o_bias + constant
    down = left[:count].T @ (rest / balance) + left[count:].T @ values
    up_k, up_v = balance * spread @ left[:count], left[count:].unflatten(0, attention.v.shape[:2])
    up_k, up_v = (up.repeat_interleave(repeats, 0) for up in (up_k, up_v))
    return latent_attention(attention, allocation, rope, down, up_k, up_v, o_bias)


def latent_attention(
    attention: Attention,
    allocation: Allocation,
    rope: RopePart,
    down: torch.Tensor,
    up_k: torch.Tensor,
    up_v: torch.Tensor,
    o_bias: torch.Tensor | None,
) -> FactoredAttention:
    """The latent attention that a layer becomes.

    Args:
        attention: The layer.
        allocation: What it is converted to.
        rope: The rotary part.
        down: `[R, E]`, from inputs to the latent.
        up_k: `[H, N, R]`, from the latent to nope keys.
        up_v: `[H, D, R]`, from the latent to values.
        o_bias: `[E]`, or None.
    """
    queries, key = rope.queries.float(), rope.key.float()
    biased = attention.k_bias is not None and attention.rotary is not None
    return FactoredAttention(
        q_nope=attention.q.float(),
        q_rope=queries[..., :-1],
        k_rope=key[..., :-1],
        down=down,
        up_k=up_k,
        up_v=up_v,
        o=attention.o.float(),
        scale=attention.scale,
        rotary=rope.rotary,
        q_nope_bias=None if attention.q_bias is None else attention.q_bias.float(),
        q_rope_bias=None if attention.q_bias is None else queries[..., -1],
        k_rope_bias=key[..., -1] if biased else None,
        o_bias=o_bias,
        projections=attention.projections,
        scoring=attention.scoring,
    )


def sized(a: FactoredAttention, second: torch.Tensor, size: float) -> FactoredAttention:
    """The same function with a latent whose root mean square is `size` or down to half of it: a power of two scales it.

    Args:
        a: There is no norm between its `down` and what reads it.
        second: `[E, E]`, the second moment of what makes the latent.
        size: How large it should be.
    """
    down = a.down.double()
    now = float(((down @ second.to(down)) * down).sum(1).mean().clamp_min(0).sqrt())
    scale = 2.0 ** math.floor(math.log2(size / now)) if now else 1.0
    return replace(a, down=scale * a.down, up_k=a.up_k / scale, up_v=a.up_v / scale)


def _spread(basis: torch.Tensor, groups: int, fold: int) -> torch.Tensor:
    """The basis `[bands, G F, G F]` as `[G, D/2, bands, G F]`: coefficients of components in each number of each KV head."""
    bands, size = basis.shape[:2]
    whole = basis.new_zeros(groups, bands, fold, bands, size)
    each = torch.arange(bands)
    whole[:, each, :, each] = basis.unflatten(1, (groups, fold))
    return whole.flatten(1, 2)
