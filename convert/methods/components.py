"""Rotary keys that all heads share, and the nope keys that approximate the remainder.

Head h's number l, z_{h,l}·x, rotates with θ_l. At each frequency the numbers of all KV heads are combinations of components,
one key y_m(x) each; those that lose most without RoPE stay rotary, and queries absorb conj(s) of z_{h,l} = Σ_m s_{h,l,m} y_m.
The remainder does not rotate; the best nope key for it is its mean over the distances at which head h attends,
φ_{h,l} (z_{h,l} − Σ_m s_{h,l,m} y_m) with φ_{h,l} = E e^{iθ_l (s − t)}. What rotates is exact at every distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from attention.record import Attention
from convert.methods.algebra import augmented, fix_signs, floored
from convert.methods.distances import mass_of, waves_at
from convert.methods.latent import RopePart, rotary_of
from convert.methods.statistics import Statistics

_COPYING = 3.0  # weight of `copying`: with 5, the real model lost 0.012 nats more, and less in far copies


@dataclass(frozen=True)
class RopeKeys:
    """The rotary part of a layer's keys, fp64, with H query heads and L frequencies. A bias is the weight of a constant input.

    Attributes:
        attention: The record.
        z: `[G, L, E + 1]` complex, the keys times the square of RoPE's attention factor.
        moved: `[G, L, E + 1]`, z Σ, with Σ the second moment of (x, 1) under attention.
        w: `[H, L, E + 1]` complex, the queries; `[H, L, D + 1]` of projections.
        importance: `[H, L]`, λ = √(E|w_{h,l}·x|²).
        mass: `[H, N]`, the share of head h's attention at distances 0 … N − 1.
        copying: `[H]`, as of `Statistics`; zeros without text.
    """

    attention: Attention
    z: torch.Tensor
    moved: torch.Tensor
    w: torch.Tensor
    importance: torch.Tensor
    mass: torch.Tensor
    copying: torch.Tensor

    @classmethod
    def of(cls, attention: Attention, statistics: Statistics) -> RopeKeys:
        rotary, second = rotary_of(attention), statistics.of_queries
        factor = rotary.attention_factor**2
        rows = augmented(attention.q, attention.q_bias)[:, : rotary.dims]
        keys = augmented(attention.k, attention.k_bias)[:, : rotary.dims]
        power = rotary.to_complex(((rows @ second) * rows).sum(-1))[0]
        importance = floored(power.real + power.imag, 1e-12).sqrt()
        seen = keys @ statistics.attended.seen_with_constant
        z, moved = (rotary.to_complex(part)[0] * factor for part in (keys, seen))
        copying = power.real.new_zeros(len(power)) if statistics.copying is None else statistics.copying
        return cls(attention, z, moved, rotary.to_complex(rows)[0], importance, mass_of(attention, statistics), copying)

    @cached_property
    def phase(self) -> torch.Tensor:
        """`[H, L]`, φ: the mean of e^{iθ_l (s − t)} over each head's distances."""
        waves = waves_at(rotary_of(self.attention), self.mass)
        return self.mass.to(waves.dtype) @ waves

    @property
    def repeats(self) -> int:
        """Query heads per KV head."""
        return len(self.w) // len(self.z)

    def per_query_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.repeat_interleave(self.repeats, 0)


@dataclass(frozen=True)
class Components:
    """Weighted complex principal components of the keys at each frequency, those that lose most without RoPE first.

    Attributes:
        lost: `[L, G]`, energy · Σ_h |u_h|² (1 − |φ_h|²) (1 + c copying_h), as a share of the sum of all with c = 0: the squared
            logit error of not rotating each component, where heads that copy count more.
        basis: `[L, G, G]`, coefficients of KV heads (rows) in components (columns).
        keys: `[L, G, E + 1]`.
    """

    lost: torch.Tensor
    basis: torch.Tensor
    keys: torch.Tensor

    @classmethod
    def of(cls, keys: RopeKeys) -> Components:
        power = keys.importance.square().unflatten(0, (-1, keys.repeats))
        importance = power.sum(1).sqrt().T  # [L, G]
        away_from_one = (1 - keys.phase.abs().square()).clamp_min(0).unflatten(0, (-1, keys.repeats))
        weight = 1 + _COPYING * keys.copying.unflatten(0, (-1, keys.repeats))[..., None]
        away, urgent = (((power * part).sum(1) / power.sum(1)).T for part in (away_from_one, weight * away_from_one))
        weighted, moved = (rows.transpose(0, 1) * importance[..., None] for rows in (keys.z, keys.moved))
        gram = moved @ weighted.mH
        energy, u = torch.linalg.eigh((gram + gram.mH) / 2)
        u = fix_signs(u)
        plain, lost = ((u.abs().square() * part[..., None]).sum(1) * energy.clamp_min(0) for part in (away, urgent))
        lost = lost / plain.sum().clamp_min(torch.finfo(lost.dtype).tiny)
        order = lost.argsort(dim=1, descending=True, stable=True)
        u = u.gather(2, order[:, None].expand_as(u))
        return cls(lost.gather(1, order), u / importance[..., None], u.mH @ weighted)

    def kept(self, keys: RopeKeys, pairs: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The costliest components of each frequency, as many as its entries in `pairs`: s `[H, L, m]`, and y `[m, E + 1]`."""
        parts = [pairs[:i].count(pair) for i, pair in enumerate(pairs)]
        coefficients = self.basis.new_zeros(*keys.z.shape[:2], len(pairs))
        for m, (pair, part) in enumerate(zip(pairs, parts, strict=True)):
            coefficients[:, pair, m] = self.basis[pair, :, part]
        return keys.per_query_head(coefficients), self.keys[list(pairs), parts]


def split(keys: RopeKeys, pairs: tuple[int, ...]) -> tuple[RopePart, torch.Tensor]:
    """The rotary part of the costliest components, and the nope keys of each query head for the remainder, `[H, 2 L, E + 1]`.

    They are zeros where only rounding remains.
    """
    rotary, (coefficients, shared) = rotary_of(keys.attention), Components.of(keys).kept(keys, pairs)
    kept = rotary.select(pairs, "interleaved")
    queries = torch.einsum("hlm,hle->hme", coefficients.conj(), keys.w)
    rope = RopePart(kept, kept.from_complex(queries), kept.from_complex(shared[None])[0])
    whole = keys.phase[..., None] * keys.per_query_head(keys.z)
    left = whole - (keys.phase[:, list(pairs)][:, None] * coefficients) @ shared
    rounding = left.abs().square().sum() <= 1e-20 * whole.abs().square().sum()
    return rope, rotary.from_complex(torch.zeros_like(left) if rounding else left)
