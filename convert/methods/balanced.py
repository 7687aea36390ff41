"""Balanced coordinates: the basis of what is cached in which rounding it costs least, and all channels are alike.

With C the second moment of what is cached, and M the matrix by which an error of one token counts, rounding A c to so many bits
costs about tr(A C Aᵀ) tr(A⁻ᵀ M A⁻¹). That is least where both are equal (Moore 1981): A = Λ^-¼ Vᵀ M^½ with M^½ C M^½ = V Λ Vᵀ.
A rotation then makes all channels alike, as formats in which several share a scale want them (QuaRot, arXiv 2404.00456). What
makes the cached numbers and what reads them absorb A. Latents and values may have any A, keys with RoPE one factor for each
pair of dims. Where a format gives channels different bits, they stay in the order of Λ, and the rotation is within its classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

import torch

from attention.forward import Heads, heads_of, values_of
from attention.qk_norm import QKNorm
from attention.record import Attention, FactoredAttention
from attention.rope import Rotary
from attention.spread import evenly_spread
from convert.methods.algebra import augmented, roots
from convert.methods.blocks import Blocks
from convert.methods.statistics import EXCERPT, Statistics

_QUERIES, _AT_ONCE = 256, 64  # of each block, evenly spread, whose attention is weighed
_PRIOR = 0.1  # how much directions count in which a text had nothing, as a share of the mean
_ROUNDING = 1e-6  # what moments of a text of one token are apart from that, of either sign, as a share of the largest


def balanced(a: FactoredAttention, statistics: Statistics) -> FactoredAttention:
    """The same function in balanced coordinates of the latent, which optimisers that move all weights alike (Adam) want, too.

    Its RoPE key is balanced as well.

    Of a latent that is divided by its norm, orthogonal maps are free, and gains behind the norm: with A = U S Vᵀ, Vᵀ and S are
    as good as A. So the channel that makes the norm constant is cached no larger than it has to be.

    Args:
        a: Nothing but such a norm is between its `down` and what reads it. Channels that nothing makes or reads stay apart. If
            its `rounding` has classes of channels, it has no such norm.
        statistics: Of the layer's input. Its sample shows which errors count; without one, all queries and heads count alike.
    """
    if a.gain is not None:
        a = replace(a, up_k=a.up_k * a.gain, up_v=a.up_v * a.gain, gain=None)
    sample = statistics.sample
    errors = _Errors.assumed(a, statistics) if sample is None else _Errors.measured(a, sample.spread(EXCERPT))
    a = _balanced_rope_key(a, statistics, errors)
    second, of_keys, of_values = _moments(a, statistics, errors)
    read = of_keys + of_values
    alive = (second.diagonal() > 0) & (read.diagonal() > 0)
    used = [channel for channel in range(len(alive)) if alive[channel]]
    if not used:
        return a
    classes = a.rounding.cut(len(a.down)) if a.rounding is not None and a.rounding.classes else []
    there, back = _coordinates(second[used][:, used], read[used][:, used], [count for _, count in classes])
    gain = None
    if a.normalised:
        _, sizes, there = torch.linalg.svd(there)
        turned = there @ second[used][:, used] @ there.T
        gain = a.down.new_full((len(a.down),), len(a.down) ** -0.5)
        # A root mean square of one. What bfloat16 holds, the other dtypes hold, too; what reads it makes up for the rounding.
        gain[used] = (sizes / (turned.diagonal() @ sizes**2).sqrt()).to(gain).bfloat16().to(gain)
        back = there.T / gain[used].double()
    down, up_k, up_v = a.down.clone(), a.up_k.clone(), a.up_v.clone()
    down[used] = (there @ a.down[used].double()).to(down)
    up_k[..., used] = (a.up_k[..., used].double() @ back).to(up_k)
    up_v[..., used] = (a.up_v[..., used].double() @ back).to(up_v)
    return replace(a, down=down, up_k=up_k, up_v=up_v, gain=gain)


@dataclass(frozen=True)
class _Errors:
    """What errors of single tokens, which know nothing of each other, cost the output of an attention over a latent.

    With p_t the attention of query t of a head, o_t = E_{s ~ p_t}[v_s], and a the scale of logits, errors δ of keys cost to
    first order a² E_t Σ_s p_ts² |W_O (v_s − o_t)|² (q_tᵀ δ_s)², and errors of values E_t Σ_s p_ts² |W_O δ_s|²: attention that
    is spread over many tokens averages them out. Heads are added up, as if errors of one knew nothing of those of another.

    Attributes:
        nope: `[H, N, N]`, fp64: the second moment of nope queries, weighed so.
        rope: `[H, P]`, fp64: the mean squares of RoPE queries, weighed so.
        values: `[H]`, fp64: E_t Σ_s p_ts².
    """

    nope: torch.Tensor
    rope: torch.Tensor
    values: torch.Tensor

    @classmethod
    def measured(cls, a: FactoredAttention, sample: Blocks) -> "_Errors":
        """On blocks of the layer's inputs."""
        columns = a.o.float().permute(1, 0, 2)  # [H, E, D]
        squares, parts = columns.mT @ columns, []
        queries = torch.tensor(evenly_spread(min(sample.context, _QUERIES), sample.context), device=a.o.device)
        for block in sample.to(a.o.device).blocks:
            heads = heads_of(replace(a, rounding=None), block.float())
            values = values_of(a, heads)
            turned = values @ squares
            for tokens in queries.split(_AT_ONCE):
                p = heads.attention_of(tokens)
                out, p_squared = p @ values, p.square()
                apart = (p_squared @ (turned * values).sum(-1)[..., None])[..., 0] - 2 * ((p_squared @ turned) * out).sum(-1)
                apart += p_squared.sum(-1) * ((out @ squares) * out).sum(-1)
                weights = a.scale**2 * apart.clamp_min(0)[..., None]  # [H, t, 1]
                nope, rope = heads.nope[:, tokens], heads.rope[:, tokens]
                parts.append(((nope * weights).mT @ nope, (rope.square() * weights).sum(1), p_squared.sum((1, 2))))
        count = len(sample.rows) * len(queries)
        return cls(*(torch.stack(part).double().sum(0) / count for part in zip(*parts, strict=True)))

    @classmethod
    def assumed(cls, a: FactoredAttention, statistics: Statistics) -> "_Errors":
        """Without a text: all queries and heads count alike, and all keys as much as all values."""
        parts, moment = (a.q_nope.double(), a.q_rope.double()), statistics.of_queries.to(a.q_nope.device)
        nope, rope = parts if a.q_down is None else (part @ a.q_down.double() for part in parts)
        nope, rope = augmented(nope, a.q_nope_bias), augmented(rope, a.q_rope_bias)
        found = cls(nope @ moment @ nope.mT, ((rope @ moment) * rope).sum(-1), nope.new_ones(len(nope)))
        second, of_keys, of_values = _moments(a, statistics, found)
        seen_keys, seen_values = float((of_keys * second).sum()), float((of_values * second).sum())
        share = seen_keys / seen_values if seen_keys > 0 and seen_values > 0 else 1.0
        return replace(found, values=found.values * share)


def _balanced_rope_key(a: FactoredAttention, statistics: Statistics, errors: _Errors) -> FactoredAttention:
    """The same function with a balanced RoPE key of a root mean square of one, by a factor for each pair of dims."""
    keys, seen = augmented(a.k_rope[None], None if a.k_rope_bias is None else a.k_rope_bias[None]), statistics.attended
    of_keys = ((keys @ seen.seen_with_constant.to(keys)) * keys).sum(-1)
    factors = _factors(*(_by_pair(a.rotary, part) for part in (of_keys, errors.rope.sum(0, keepdim=True))))[0]
    k, k_bias, _ = _scaled(a.k_rope[None], None if a.k_rope_bias is None else a.k_rope_bias[None], None, factors[None])
    q, q_bias, _ = _scaled(a.q_rope, a.q_rope_bias, None, 1 / factors[None])
    return replace(a, k_rope=k[0], k_rope_bias=None if k_bias is None else k_bias[0], q_rope=q, q_rope_bias=q_bias)


def balanced_heads(a: Attention, sample: Blocks) -> Attention:
    """The same function with balanced keys and values, each of a root mean square of about one.

    A pair of rotary dims, or a nope dim, of all keys of a KV head has one factor, a power of two, so that keys and queries keep
    their bits. Where a norm's gains are the same for all heads, so are the factors.

    Args:
        a: No clamp is behind its projections.
        sample: The layer's inputs.
    """
    heads = [heads_of(a, block.float()) for block in sample.spread(EXCERPT).blocks]
    a = _balanced_keys(a, heads)
    values = torch.cat([values_of(a, each) for each in heads], 1).double()
    repeats = len(a.q) // len(a.v)
    outputs = a.o.double().permute(1, 2, 0).unflatten(0, (-1, repeats))  # [G, n, D, E]
    read = (outputs @ outputs.mT).sum(1)
    second = values.mT @ values / values.shape[1]
    v, bias, o = a.v.float().clone(), None if a.v_bias is None else a.v_bias.float().clone(), a.o.float().clone()
    for head in range(len(v)):
        alive = (second[head].diagonal() > 0) & (read[head].diagonal() > 0)
        if not (live := [dim for dim in range(len(alive)) if alive[dim]]):
            continue
        used = torch.tensor(live, device=alive.device)
        there, back = (torch.eye(len(second[head])).to(second) for _ in range(2))
        found = _coordinates(second[head][used][:, used], read[head][used][:, used])
        there[used[:, None], used], back[used[:, None], used] = found
        size = _power_of_two((there @ second[head] @ there.T).diagonal()[used].mean().sqrt())
        v[head] = (there @ v[head].double() / size).to(v)
        if bias is not None:
            bias[head] = (there @ bias[head].double() / size).to(bias)
        own = slice(head * repeats, (head + 1) * repeats)
        o[:, own] = (o[:, own].double() @ back * size).to(o)
    return replace(a, v=v, v_bias=bias, o=o)


def _balanced_keys(a: Attention, heads: list[Heads]) -> Attention:
    """The same function with one factor for each pair of dims of a KV head's keys, and its inverse in the queries'.

    Gains that are stored less one (Gemma) would lose bits, and a norm without gains takes no factors: these keys stay as they
    are.
    """
    if any(norm is not None and (norm.form.gain_offset or norm.form.fixed) for norm in (a.k_norm, a.q_norm)):
        return a
    groups = len(a.k)
    of_keys = _energies([torch.cat((each.kept_rope, each.kept_nope), -1) for each in heads])
    of_queries = _energies([torch.cat((each.rope, each.nope), -1) for each in heads]).unflatten(0, (groups, -1)).sum(1)
    if any(norm is not None and not norm.per_head_gains for norm in (a.k_norm, a.q_norm)):
        of_keys, of_queries = (part.mean(0, keepdim=True).expand(groups, -1) for part in (of_keys, of_queries))
    if a.rotary is not None:
        of_keys, of_queries = (_by_pair(a.rotary, part) for part in (of_keys, of_queries))
    factors = _power_of_two(_factors(of_keys, of_queries))
    inverse = (1 / factors).repeat_interleave(len(a.q) // groups, 0)
    k, k_bias, k_norm = _scaled(a.k, a.k_bias, a.k_norm, factors)
    q, q_bias, q_norm = _scaled(a.q, a.q_bias, a.q_norm, inverse)
    return replace(a, k=k, k_bias=k_bias, k_norm=k_norm, q=q, q_bias=q_bias, q_norm=q_norm)


def _energies(states: list[torch.Tensor]) -> torch.Tensor:
    """`[heads, D]`, fp64: the mean squares of `[heads, T, D]` each."""
    return torch.cat(states, 1).double().square().mean(1)


def _by_pair(rotary: Rotary, energies: torch.Tensor) -> torch.Tensor:
    """`[heads, D]` with the mean of each rotary pair in both of its dims."""
    pairs, nope = rotary.to_complex(energies)
    mean = (pairs.real + pairs.imag) / 2
    return rotary.from_complex(torch.complex(mean, mean), nope)


def _factors(of_keys: torch.Tensor, of_queries: torch.Tensor) -> torch.Tensor:
    """The factors `[heads, D]` with which rounding keys costs least and their root mean square is one.

    Arguments are energies `[heads, D]`: C of keys, and M of the queries that read them, added, each times what its errors cost.
    With factors f, rounding to steps of s costs s² Σ M / f². A group's step is its range. That is more than the 2-norm of what
    its dims are (their energy) and less than the ∞-norm (the largest); the 4-norm stands for it here:
    s² = (Σ f⁴ C²)^½. The product of both is least at f⁶ = M / C².
    """
    least = torch.finfo(torch.float64).tiny
    factors = of_queries.clamp_min(least) ** (1 / 6) / of_keys.clamp_min(least) ** (1 / 3)
    alive = (of_queries > 0) & (of_keys > 0)
    smallest = torch.nn.functional.pad(factors.where(alive, torch.inf), (0, 1), value=torch.inf).amin(-1, keepdim=True)
    factors = factors.where(alive, smallest.where(smallest.isfinite(), 1.0))  # others must not set the range of a group
    size = (of_keys * factors.square()).mean(-1, keepdim=True).sqrt()
    return factors / size.where(size > 0, 1.0)


def _scaled(
    weight: torch.Tensor, bias: torch.Tensor | None, norm: QKNorm | None, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, QKNorm | None]:
    """Projections, or the gains of the norm behind them, with each dim `[heads, D]` of a head times its factor."""
    if norm is None:
        return weight * factors[..., None].to(weight), None if bias is None else bias * factors.to(bias), None
    own = (factors if norm.per_head_gains else factors[:1]).to(norm.gain)
    return weight, bias, replace(norm, gain=norm.gain * own, bias=None if norm.bias is None else norm.bias * own)


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    """The nearest powers of two."""
    return values.log2().round().exp2()


def _moments(a: FactoredAttention, statistics: Statistics, errors: _Errors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[R, R]` each, fp64: the second moment of the latent as attention sees it, and how errors of keys and of values count."""
    down, up_k, up_v = a.down.double(), a.up_k.double(), a.up_v.double()
    second = down @ statistics.attended.seen.to(down) @ down.T
    columns = a.o.double().permute(1, 0, 2)
    of_values = errors.values[:, None, None] * (up_v.mT @ (columns.mT @ columns) @ up_v)
    return second, (up_k.mT @ errors.nope @ up_k).sum(0), of_values.sum(0)


def _coordinates(second: torch.Tensor, read: torch.Tensor, classes: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """The map A to balanced coordinates, and its inverse, `[n, n]` each, fp64.

    Directions that the text hardly shows count as if it did a little, so that A is well-conditioned.

    Args:
        second: C, with a diagonal above zero.
        read: M, with a diagonal above zero.
        classes: How many channels are alike each, those with the most energy first; none if all are.
    """
    sizes = read.diagonal().sqrt()
    correlations = read / sizes / sizes[:, None]
    (weigh,), (unweigh,) = roots((correlations + _PRIOR * torch.eye(len(read)).to(correlations))[None], _ROUNDING)
    weigh, unweigh = weigh * sizes, unweigh / sizes[:, None]
    energies, vectors = torch.linalg.eigh(weigh @ second @ weigh.T)
    energies = energies.clamp_min(0)  # below zero, they are rounding
    if classes:
        energies, vectors = energies.flip(0), vectors.flip(1)
    scale = (energies + _PRIOR * energies.mean())[:, None] ** 0.25
    rotation = torch.block_diag(*map(_rotation, _within(classes or [len(read)], len(read)))).to(weigh)
    return rotation @ (vectors.T / scale) @ weigh, unweigh @ (vectors * scale.T) @ rotation.T


def _within(classes: Sequence[int], size: int) -> list[int]:
    """As many channels of the classes as there are."""
    ends = [min(end, size) for end in accumulate(classes)]
    return [end - start for start, end in pairwise((0, *ends)) if end > start]


@cache
def _rotation(size: int) -> torch.Tensor:
    """A random orthogonal matrix `[size, size]`, fp64, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
