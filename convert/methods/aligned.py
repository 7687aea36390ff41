"""`aligned`: the heads of a group are aligned before they are merged; queries and the output projection absorb the change.

Keys: RoPE multiplies complex number l of a head by e^{iθ_l t}, so a complex factor per head and frequency commutes and can
be absorbed into the queries. Per group and frequency, with λ_g² = Σ_h E|q_h|² over the query heads of KV head g, the shared
key is u^H Λ Z for the top eigenvector u of Λ Z Σ_l Z^H Λ: the best rank-1 fit of the logits if queries, keys and frequencies
were independent (Σ_l: see `rotated_moments`). Head h's query absorbs conj(u_g) / λ_g. Nope dims: the stacked M_g^½ K_g Σ_K^½,
truncated to N dims by SVD, with M_g = Σ_h E[q_h q_hᵀ]. Values: the stacked (Σ_h O_hᵀ O_h)^½ V_g Σ_V^½, truncated to D; W_O
absorbs the rest. A bias is the weight of a constant input. Σ_K and Σ_V are moments of x as attention sees it (`Attended`),
measured on calibration text, or assumed from the gains of the input's norm.

Before a QK-norm, queries cannot absorb all of that: it gives every head one size. There the same is done for queries and keys
of expected size, gains included, and what results is divided by the gains: directions are those of the best fit, and sizes are
the norm's. `convert.calibration.refit` then fits both through the norm.

Cost per group of n heads: D/2 eigendecompositions of n × n matrices and one of an n D × n D matrix, at most E × E
where G D = E; the attention of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention.qk_norm import QKNorm
from attention.record import Attention
from convert.methods.algebra import augmented, fix_signs, floored, roots
from convert.methods.distances import rotated_moments
from convert.methods.grouped import GroupedMethod, merged_norm
from convert.methods.statistics import Statistics, expected_rows, expected_size
from convert.methods.text import TextUse

_LEAST_GAIN = 1e-6  # of the largest: rows are not divided by less


@dataclass(frozen=True)
class _Blocks:
    """The rows of heads, N each, their importance, and their weighted Gram matrix (root_g R_g) Σ (root_h R_h)ᵀ.

    Attributes:
        rows: `[G, N, E + 1]`.
        root: `[G, N, N]`.
        inverse: `[G, N, N]`, of `root`.
        gram: `[G, N, G, N]`.
    """

    rows: torch.Tensor
    root: torch.Tensor
    inverse: torch.Tensor
    gram: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, importance: torch.Tensor, second: torch.Tensor) -> _Blocks:
        """`importance [G, N, N]` weighs the squared error of each head's rows."""
        root, inverse = roots(importance, 1e-12)
        weighted = (root @ rows).flatten(0, 1)
        gram = weighted @ second @ weighted.T
        return cls(rows, root, inverse, gram.unflatten(1, rows.shape[:2]).unflatten(0, rows.shape[:2]))

    def merged(self, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The best N shared rows `[N, E + 1]`, and `back [n, N, N]`: rows of head g ≈ back_g @ shared."""
        count = self.rows.shape[1]
        gram = self.gram[heads][:, :, heads].flatten(2).flatten(0, 1)
        left = fix_signs(torch.linalg.eigh((gram + gram.T) / 2).eigenvectors.flip(-1)[:, :count])
        shared = left.T @ (self.root[heads] @ self.rows[heads]).flatten(0, 1)
        return shared, self.inverse[heads] @ left.unflatten(0, (len(heads), count))


@dataclass(frozen=True)
class _Numbers:
    """Numbers that each head has one of, complex ones of rotary pairs or real ones, and their importance and Gram matrices.

    Attributes:
        z: `[G, L, E + 1]`, the keys times their importance.
        importance: `[G, L]`, λ.
        gram: `[L, G, G]`, z Σ_l z^H.
    """

    z: torch.Tensor
    importance: torch.Tensor
    gram: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, moved: torch.Tensor, power: torch.Tensor) -> _Numbers:
        """`keys [G, L, E + 1]`, the same times Σ_l, and λ² `[G, L]`."""
        importance = floored(power, 1e-12).sqrt()
        z, moved = keys * importance[..., None], moved * importance[..., None]
        gram = torch.einsum("gle,hle->lgh", moved, z.conj())
        return cls(z, importance, (gram + gram.mH) / 2)

    def merged(self, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The shared key `[L, E + 1]`, and `factor [n, L]`: that of head g ≈ factor_g · key."""
        u = fix_signs(torch.linalg.eigh(self.gram[:, heads][:, :, heads]).eigenvectors[..., -1:])[..., 0]  # [L, n]
        key = torch.einsum("lg,gle->le", u.conj(), self.z[heads])
        factor = u.T / self.importance[heads]
        # Scale the key to the average size of its heads, so that neither keys nor queries leave the range of float16.
        size = factor.abs().square().mean(0).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        return key * size[:, None], factor / size


class _Heads:
    """One layer's heads in fp64, prepared for merging in any groups. Behind a QK-norm, they are as large as it makes them."""

    def __init__(self, attention: Attention, statistics: Statistics) -> None:
        self.attention, shrunk = attention, statistics.shrunk(attention.projections).to(attention.k.device)
        self.repeats, self.rope = attention.q.shape[0] // attention.num_kv_heads, 0
        a, moment = attention, shrunk.with_constant
        plain_q, plain_k = augmented(a.q, a.q_bias), augmented(a.k, a.k_bias)
        q, k = expected_rows(plain_q, a.q_norm, moment), expected_rows(plain_k, a.k_norm, moment)
        self.sizes = _sizes(plain_q, a.q_norm, moment), _sizes(plain_k, a.k_norm, moment)
        self.q, self.k = q.unflatten(0, (-1, self.repeats)), k  # [G, repeats, D, E + 1], [G, D, E + 1]
        v = augmented(a.v, a.v_bias)
        self.o = a.o.double().permute(1, 0, 2).unflatten(0, (-1, self.repeats))  # [G, repeats, E, D]
        columns = self.o.flatten(1, 2)
        self.values = _Blocks.of(v, columns.mT @ columns, shrunk.attended.read_with_constant)
        self.rotary: _Numbers | None = None
        self.nope: _Blocks | _Numbers | None = None
        if a.rotary:
            self.rope = a.rotary.dims
            power = a.rotary.to_complex(self._power(self.q[:, :, : self.rope], shrunk))[0]
            keys = a.rotary.to_complex(self.k[:, : self.rope])[0]
            self.rotary = _Numbers.of(keys, rotated_moments(a, self.k[:, : self.rope], shrunk), power.real + power.imag)
        if self.rope < self.k.shape[1]:
            rest, keys, within = self.q[:, :, self.rope :], self.k[:, self.rope :], shrunk.attended.within_with_constant
            if a.k_norm is None:
                self.nope = _Blocks.of(keys, (rest @ self._of_queries(shrunk) @ rest.mT).sum(1), within)
            else:  # dims cannot be mixed
                self.nope = _Numbers.of(keys, keys @ within, self._power(rest, shrunk))

    def _of_queries(self, statistics: Statistics) -> torch.Tensor:
        """The second moment of what queries read, `[E + 1, E + 1]`, or `[G, repeats, D + 1, D + 1]` of projections."""
        moment = statistics.of_queries
        return moment if moment.ndim == 2 else moment.unflatten(0, (-1, self.repeats))

    def _power(self, rows: torch.Tensor, statistics: Statistics) -> torch.Tensor:
        """`[G, …]`, the mean square of queries' `rows [G, repeats, …, E + 1]`, summed over the heads of a group."""
        return ((rows @ self._of_queries(statistics)) * rows).sum(-1).sum(1)

    def merged_key(self, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[n, repeats, D, E + 1]` and the one key `[D, E + 1]`."""
        parts = [self._shared_rope_key(heads, self.rotary)] if self.rotary else []
        rest = self.q[heads][:, :, self.rope :]
        if isinstance(self.nope, _Blocks):
            key, back = self.nope.merged(heads)
            parts.append((back.mT[:, None] @ rest, key))
        elif self.nope:
            key, factor = self.nope.merged(heads)
            parts.append((rest * factor[:, None, :, None], key))
        queries, keys = zip(*parts, strict=True)
        return torch.cat(queries, 2), torch.cat(keys)

    def _shared_rope_key(self, heads: list[int], found: _Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        rotary, (key, factor) = self.attention.rotary, found.merged(heads)
        assert rotary is not None
        numbers = rotary.to_complex(self.q[heads][:, :, : self.rope].flatten(0, 1))[0].unflatten(0, (len(heads), -1))
        queries = rotary.from_complex((numbers * factor.conj()[:, None, :, None]).flatten(0, 1))
        return queries.unflatten(0, (len(heads), -1)), rotary.from_complex(key[None])[0]

    def merged_value(self, heads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output columns `[n, repeats, E, D]` and the one value `[D, E + 1]`."""
        value, back = self.values.merged(heads)
        return self.o[heads] @ back[:, None], value


def merge(attention: Attention, groups: int, statistics: Statistics) -> Attention:
    """K̂, V̂ with `groups` heads, and the queries and output columns to match; fp32. Equal heads merge without loss."""
    a, heads = attention, _Heads(attention, statistics)
    members = torch.arange(a.num_kv_heads).view(groups, -1).tolist()
    keys, values = [heads.merged_key(group) for group in members], [heads.merged_value(group) for group in members]
    k_norm = merged_norm(a.k_norm, lambda rows: rows.float().unflatten(0, (groups, -1)).mean(1))
    of_queries, of_keys = heads.sizes[0], heads.sizes[1].unflatten(0, (groups, -1)).mean(1)
    q = _before(a.q_norm, torch.stack([queries for queries, _ in keys]).flatten(0, 2), of_queries).float()
    k = _before(k_norm, torch.stack([key for _, key in keys]), of_keys).float()
    v = torch.stack([value for _, value in values]).float()
    return replace(
        a,
        q=q[..., :-1],
        k=k[..., :-1],
        v=v[..., :-1],
        o=torch.stack([outputs for outputs, _ in values]).flatten(0, 2).permute(1, 0, 2).float(),
        q_bias=None if a.q_bias is None else q[..., -1],
        k_bias=None if a.k_bias is None else k[..., -1],
        v_bias=None if a.v_bias is None else v[..., -1],
        k_norm=k_norm,
    )


def _sizes(rows: torch.Tensor, norm: QKNorm | None, moment: torch.Tensor) -> torch.Tensor:
    """`[heads, 1, 1]`, what a norm is expected to divide each head's rows by; ones without a norm."""
    one = rows.new_ones(len(rows), 1, 1)
    if norm is None:
        return one
    if norm.form.kind == "layer":
        rows = rows - rows.mean((1,) if norm.form.scope == "head" else (0, 1), keepdim=True)
    return one * expected_size(rows, norm, moment)


def _before(norm: QKNorm | None, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Rows `[heads, D, E + 1]` of these sizes that a norm's gains make these of: its epsilon counts as before."""
    if norm is None:
        return rows
    if norm.bias is not None:
        rows = torch.cat((rows[..., :-1], rows[..., -1:] - norm.bias.double()[..., None]), -1)
    gain = norm.gain.double() + norm.form.gain_offset
    least = _LEAST_GAIN * gain.abs().amax()
    least = torch.where(least > 0, least, torch.ones_like(least))  # all may be zero
    return rows * sizes / torch.where(gain.abs() < least, least, gain)[..., None]


METHOD = GroupedMethod("aligned", "heads aligned with each other", "", TextUse.USED, merge)
