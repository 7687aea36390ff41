"""`weighted`: MLA that keeps what logits and outputs depend on, as measured on calibration text.

Rope keys: weighted complex principal components. Head h's number l, z_{h,l}·x, rotates with θ_l. At each frequency the numbers
of all KV heads are combinations of components, one key y_m(x) each. Those whose logits lose most without RoPE stay rotary, some
exchanged by trial, and queries absorb conj(s) of z_{h,l} = Σ_m s_{h,l,m} y_m. The remainder does not rotate; the best nope key
for it is its mean over the distances at which head h attends, φ_{h,l} (z_{h,l} − Σ_m s_{h,l,m} y_m) with
φ_{h,l} = E e^{iθ_l (s − t)}. What rotates is exact at every distance.

Nope keys share one latent with the values. Keys are weighed by Σ_K = E_t Cov_{s ~ p_t}(x_s) and values by
Σ_V = Cov_t(E_{s ~ p_t}[x_s]), with p_t the attention of token t: a constant on nope keys cancels in the softmax, and the mean
of what truncation removes from the values is added to the output bias. The latent is the truncated SVD of
[α M_h^½ K_h ; (Σ_h w_h O_hᵀ O_h)^½ V_g] Σ^½, with M_h = E[q_h q_hᵀ] and Σ the mean of Σ_K and Σ_V, both scaled to one trace.
Heads that copy have a w_h above 1 where their values would be lost (`_values`). Keys and values are then regressed on the
latent, each by its own Σ. α² times the ratio of both energies, κ, is the value in `_BALANCES` with the least error of attention
outputs on a sample of the text.

Without text, inputs follow from the gains of their norm, attention falls off as one over the distance, and κ is 1.

Cost per layer: L eigendecompositions of G × G, a Cholesky factorisation of E × E, an eigendecomposition of E × E for w, and for
each κ another one, a QR of (H + G) D × R and the attention of the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from attention.forward import attention_output
from attention.record import Attention, FactoredAttention
from convert.methods.algebra import augmented, fix_signs, floored, leading, root, roots
from convert.methods.distances import mass_of, waves_at
from convert.methods.frequencies import pairs_by_loss, pairs_on_ladder
from convert.methods.latent import Allocation, LatentMethod, RopePart, latent_attention, no_rope_part, rotary_of
from convert.methods.statistics import EXCERPT, Attended, Statistics
from convert.methods.text import TextUse

_BALANCES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_OF_COPIES = 50  # the weight of errors of a head that always copies, and whose values would be lost
_NOTHING = 1e-6  # of the second moment of inputs: sums in fp32 are not more exact


def factor(attention: Attention, allocation: Allocation, statistics: Statistics) -> FactoredAttention:
    """The latent attention."""
    statistics = statistics.shrunk(attention.projections).to(attention.k.device)
    if attention.rotary is None:  # all keys go into the latent
        repeats = attention.q.shape[0] // attention.num_kv_heads
        rope, rest = no_rope_part(attention, allocation), augmented(attention.k, attention.k_bias).repeat_interleave(repeats, 0)
    else:
        rope, rest = RopeKeys.of(attention, statistics).split(allocation.pairs)
    factored, competing = _latent(attention, allocation, rope, rest, statistics)
    del rest  # one of the largest tensors here
    if statistics.sample is None or not competing:
        return factored(1.0)
    sample = statistics.sample.spread(EXCERPT)
    trial = sample.of(range(0, len(sample.rows), 2)).blocks  # half of it is enough to rank a few results
    expected = attention_output(attention, trial)
    return min(map(factored, _BALANCES), key=lambda result: float((attention_output(result, trial) - expected).square().sum()))


def rotating(attention: Attention, statistics: Statistics) -> Callable[[Sequence[int]], FactoredAttention]:
    """Maps frequencies to the attention in which they alone rotate: its latent is the layer's input, and loses nothing."""
    keys = RopeKeys.of(attention, statistics.shrunk(attention.projections).to(attention.k.device))
    values, inputs = keys.per_query_head(attention.v.float()), torch.eye(attention.v.shape[-1]).to(attention.v.device)
    bias = _output_bias(attention, attention.v[..., 0] * 0 if attention.v_bias is None else attention.v_bias)

    def made(pairs: Sequence[int]) -> FactoredAttention:
        whole = Allocation(len(inputs), tuple(sorted(pairs)))
        rope, rest = keys.split(whole.pairs)
        return latent_attention(attention, whole, rope, inputs, rest[..., :-1].float(), values, bias)

    return made


def _output_bias(a: Attention, constant: torch.Tensor) -> torch.Tensor:
    """`[E]`, the output's bias with what a `constant [G, D]` of all values puts out."""
    bias = torch.einsum("ehd,hd->e", a.o.double(), constant.double().repeat_interleave(len(a.q) // len(constant), 0))
    return (bias if a.o_bias is None else bias + a.o_bias.double()).float()


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
    """

    attention: Attention
    z: torch.Tensor
    moved: torch.Tensor
    w: torch.Tensor
    importance: torch.Tensor
    mass: torch.Tensor

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
        return cls(attention, z, moved, rotary.to_complex(rows)[0], importance, mass_of(attention, statistics))

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

    @cached_property
    def components(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weighted complex principal components at each frequency, those that lose most without RoPE first.

        Returns:
            `[L, G]`, energy · Σ_h |u_h|² (1 − |φ_h|²), as a share of the sum of all: the squared logit error of not rotating
            each component; `[L, G, G]`, coefficients of KV heads (rows) in components (columns); and these, `[L, G, E + 1]`.
        """
        power = self.importance.square().unflatten(0, (-1, self.repeats))
        importance = power.sum(1).sqrt().T  # [L, G]
        away_from_one = (1 - self.phase.abs().square()).clamp_min(0).unflatten(0, (-1, self.repeats))
        away = ((power * away_from_one).sum(1) / power.sum(1)).T
        weighted, moved = (rows.transpose(0, 1) * importance[..., None] for rows in (self.z, self.moved))
        gram = moved @ weighted.mH
        energy, u = torch.linalg.eigh((gram + gram.mH) / 2)
        u = fix_signs(u)
        lost = (u.abs().square() * away[..., None]).sum(1) * energy.clamp_min(0)
        lost = lost / lost.sum().clamp_min(torch.finfo(lost.dtype).tiny)
        order = lost.argsort(dim=1, descending=True, stable=True)
        u = u.gather(2, order[:, None].expand_as(u))
        return lost.gather(1, order), u / importance[..., None], u.mH @ weighted

    def kept(self, pairs: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The costliest components of each frequency, as many as its entries in `pairs`: s `[H, L, m]`, and y `[m, E + 1]`."""
        _, basis, components = self.components
        # The costliest last, where `Format.paired` has more bits.
        parts = [pairs[i + 1 :].count(pair) for i, pair in enumerate(pairs)]
        coefficients = basis.new_zeros(*self.z.shape[:2], len(pairs))
        for m, (pair, part) in enumerate(zip(pairs, parts, strict=True)):
            coefficients[:, pair, m] = basis[pair, :, part]
        return self.per_query_head(coefficients), components[list(pairs), parts]

    def split(self, pairs: tuple[int, ...]) -> tuple[RopePart, torch.Tensor]:
        """The rotary part of the kept components; and the nope keys of each query head `[H, D, E + 1]`, first those for the
        remainder, which are zeros where only rounding remains.
        """
        rotary, (coefficients, shared) = rotary_of(self.attention), self.kept(pairs)
        kept = rotary.select(pairs, "interleaved")
        queries = torch.einsum("hlm,hle->hme", coefficients.conj(), self.w)
        rope = RopePart(kept, kept.from_complex(queries), kept.from_complex(shared[None])[0])
        whole = self.phase[..., None] * self.per_query_head(self.z)
        left = whole - (self.phase[:, list(pairs)][:, None] * coefficients) @ shared
        rounding = left.abs().square().sum() <= 1e-20 * whole.abs().square().sum()
        nope = self.per_query_head(augmented(self.attention.k, self.attention.k_bias)[:, rotary.dims :])
        return rope, rotary.from_complex(torch.zeros_like(left) if rounding else left, nope)


def _latent(
    a: Attention, allocation: Allocation, rope: RopePart, rest: torch.Tensor, statistics: Statistics
) -> tuple[Callable[[float], FactoredAttention], bool]:
    """Maps κ to the latent attention with nope keys `rest [H, N, E + 1]`, and whether it has keys and values to balance."""
    attended, (groups, dim), repeats = statistics.attended, a.v.shape[:2], a.q.shape[0] // a.num_kv_heads
    q = augmented(a.q, a.q_bias)
    weigh_keys, unweigh_keys = roots(q @ statistics.of_queries @ q.mT, 1e-6)
    keys, spread = weigh_keys @ rest[..., :-1], root(_common(attended))  # [H, N, E]
    of_keys = keys.flatten(0, 1) @ spread
    gram, count = of_keys.T @ of_keys, len(of_keys)
    values, unweigh_values = _values(a, attended, spread, gram, allocation.rank)
    images = of_keys, values.flatten(0, 1) @ spread
    grams = gram, images[1].T @ images[1]
    competing = bool(grams[0].diagonal().sum() > 0 and grams[1].diagonal().sum() > 0)

    def factored(balance: float) -> FactoredAttention:
        alpha = (balance * grams[1].trace() / grams[0].trace()).sqrt() if competing else 1.0
        directions = leading(alpha**2 * grams[0] + grams[1], allocation.rank)
        left = torch.linalg.qr(torch.cat((alpha * (images[0] @ directions), images[1] @ directions))).Q
        of_keys, of_values = left[:count].unflatten(0, keys.shape[:2]), left[count:].unflatten(0, (groups, dim))
        down = alpha * left[:count].T @ keys.flatten(0, 1) + left[count:].T @ values.flatten(0, 1)
        noise = _NOTHING * float(((down @ attended.seen) * down).sum(1).mean())
        of_keys = _regressed(keys, of_keys / alpha, down, attended.within, noise)
        up_v = unweigh_values @ _regressed(values, of_values, down, attended.read_covariance, noise)
        dropped = (a.v.double() - up_v @ down) @ attended.mean  # the mean that truncation removes from values [G, D]
        constant = dropped if a.v_bias is None else dropped + a.v_bias.double()
        up_k, up_v = unweigh_keys @ of_keys, up_v.repeat_interleave(repeats, 0)
        return latent_attention(a, allocation, rope, down.float(), up_k.float(), up_v.float(), _output_bias(a, constant))

    return factored, competing


def _values(
    a: Attention, attended: Attended, spread: torch.Tensor, of_keys: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values `[G, D, E]`, weighted by what their errors cost outputs, and what undoes the weights `[G, D, D]`.

    Heads that copy read something new at few tokens, and moments hardly show it. So their errors count more, by the share of
    their values that a latent loses where keys, whose Gram matrix is `of_keys [E, E]`, and values have equal energy.
    """
    repeats, columns = len(a.q) // len(a.v), a.o.double().permute(1, 0, 2)  # [H, E, D]

    def weighted(importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weigh, unweigh = roots((importance * columns.mT @ columns).unflatten(0, (-1, repeats)).sum(1), 1e-6)
        return weigh @ a.v.double(), unweigh

    values, unweigh = weighted(columns.new_ones(()))
    if attended.matching is None:
        return values, unweigh
    images, least = values @ spread, torch.finfo(values.dtype).tiny  # [G, D, E]
    of_values = images.flatten(0, 1).T @ images.flatten(0, 1)
    of_keys, of_values = (gram / gram.trace().clamp_min(least) for gram in (of_keys, of_values))
    kept = images @ leading(of_keys + of_values, rank)
    lost = 1 - kept.square().sum((1, 2)) / images.square().sum((1, 2)).clamp_min(least)
    return weighted(attended.importance(_OF_COPIES * lost.repeat_interleave(repeats)))


def _common(attended: Attended) -> torch.Tensor:
    """Σ `[E, E]`, by which one latent is chosen for keys and values: the mean of both covariances, scaled to one trace.

    A covariance that is no more than rounding, as where all heads read one token, is left out.
    """
    covariances, whole = (attended.within, attended.read_covariance), attended.seen.trace()
    scaled = [part / part.trace() for part in covariances if part.trace() > _NOTHING * whole]
    return whole * torch.stack(scaled).mean(0) if scaled else attended.seen


def _regressed(
    rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor, covariance: torch.Tensor, noise: float
) -> torch.Tensor:
    """`up [n, D, R]` such that up · (down x) is closest to `rows [n, D, E]` · x; what is exact already stays as it is.

    The ridge on the change of `up` is `noise`, the mean square of a latent channel that is no more than rounding.
    """
    moved = covariance @ down.T
    missing = ((rows - up @ down) @ moved).flatten(0, 1)
    ridge = max(noise, torch.finfo(torch.float64).tiny) * torch.eye(len(down)).to(moved)
    change = torch.linalg.solve(down @ moved + ridge, missing, left=False)
    return up + change.unflatten(0, rows.shape[:2])


def measure(attention: Attention, statistics: Statistics) -> torch.Tensor:
    """`[L, G]`: what not rotating each component costs the logits (`RopeKeys.components`)."""
    return RopeKeys.of(attention, statistics.shrunk(attention.projections).to(attention.k.device)).components[0]


def allocate(found: list[torch.Tensor], count: int, allocation: Allocation) -> tuple[int, ...]:
    """The frequencies of the costliest components, or the ladder that holds most of them."""
    return pairs_on_ladder(found, count) if allocation.ladder else pairs_by_loss(found, count)


METHOD = LatentMethod(
    "weighted", "what logits and outputs depend on, in one latent", "", TextUse.USED, False, measure, allocate, factor, rotating
)
