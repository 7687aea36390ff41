"""`aligned`: the heads of a group are aligned before they are merged; queries and the output projection absorb the change.

Keys: RoPE multiplies complex number l of a head by e^{iθ_l t}, so a complex factor per head and frequency commutes and can
be absorbed into the queries. Per group and frequency, with λ_g² = Σ_h E|q_h|² over the query heads of KV head g, the shared
key is u^H Λ Z for the top eigenvector u of Λ Z Σ_l Z^H Λ: the best rank-1 fit of the logits if queries, keys and frequencies
were independent (Σ_l: see `rotated_moments`). Head h's query absorbs conj(u_g) / λ_g. Nope dims: the stacked M_g^½ K_g Σ_K^½,
truncated to N dims by SVD, with M_g = Σ_h E[q_h q_hᵀ]. Values: the stacked (Σ_h O_hᵀ O_h)^½ V_g Σ_V^½, truncated to D; W_O
absorbs the rest. A bias is the weight of a constant input. Σ_K and Σ_V are moments of x as attention sees it (`Attended`),
measured on calibration text, or assumed from the gains of the input's norm. Heads that copy count more (`Attended.importance`).

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
from attention.rope import Rotary
from convert.methods.algebra import augmented, fix_signs, floored, roots
from convert.methods.distances import rotated_moments
from convert.methods.grouped import GroupedMethod, merged_norm
from convert.methods.statistics import IN_MERGES, Statistics, expected_rows
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
        """`back [n, N, N]`, and the best N shared rows `[N, E + 1]`: rows of head g ≈ back_g @ shared."""
        count = self.rows.shape[1]
        gram = self.gram[heads][:, :, heads].flatten(2).flatten(0, 1)
        left = fix_signs(torch.linalg.eigh((gram + gram.T) / 2).eigenvectors.flip(-1)[:, :count])
        shared = left.T @ (self.root[heads] @ self.rows[heads]).flatten(0, 1)
        back, size = _sized(self.inverse[heads] @ left.unflatten(0, (len(heads), count)))
        return back, shared * size[:, None]

    def shared(self, heads: list[int], queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[n, repeats, N, E + 1]` for one key, and the key `[N, E + 1]`."""
        back, key = self.merged(heads)
        return back.mT[:, None] @ queries, key


@dataclass(frozen=True)
class _Numbers:
    """Numbers that each head has one of, complex ones of rotary pairs or real ones, and their importance and Gram matrices.

    Attributes:
        z: `[G, L, E + 1]`, the keys times their importance.
        importance: `[G, L]`, λ.
        gram: `[L, G, G]`, z Σ_l z^H.
        rotary: How complex ones rotate; None for real ones.
    """

    z: torch.Tensor
    importance: torch.Tensor
    gram: torch.Tensor
    rotary: Rotary | None

    @classmethod
    def of(cls, keys: torch.Tensor, moved: torch.Tensor, power: torch.Tensor, rotary: Rotary | None = None) -> _Numbers:
        """`keys [G, L, E + 1]`, the same times Σ_l, and λ² `[G, L]`."""
        importance = floored(power, 1e-12).sqrt()
        z, moved = keys * importance[..., None], moved * importance[..., None]
        gram = torch.einsum("gle,hle->lgh", moved, z.conj())
        return cls(z, importance, (gram + gram.mH) / 2, rotary)

    def shared(self, heads: list[int], queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `_Blocks`."""
        u = fix_signs(torch.linalg.eigh(self.gram[:, heads][:, :, heads]).eigenvectors[..., -1:])[..., 0]  # [L, n]
        key = torch.einsum("lg,gle->le", u.conj(), self.z[heads])
        factor = u.T / self.importance[heads]  # [n, L]: the number of head g ≈ factor_g · key
        factor, size = _sized(factor[:, None])
        key, factor = key * size[:, None], factor[..., None]
        if self.rotary is None:
            return queries * factor, key
        numbers = self.rotary.to_complex(queries.flatten(0, 1))[0].unflatten(0, (len(heads), -1))
        queries = self.rotary.from_complex((numbers * factor.conj()).flatten(0, 1))
        return queries.unflatten(0, (len(heads), -1)), self.rotary.from_complex(key[None])[0]


def _sized(factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors `[n, N, M]`, which make rows of n heads of M shared rows, divided by their size; and that size, `[M]`.

    Shared rows times that size are as large as heads: nothing leaves the range of float16, and one learning rate suits all.
    """
    size = factors.abs().square().sum(1).mean(0).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return factors / size, size


def merge(attention: Attention, groups: int, statistics: Statistics) -> Attention:
    """K̂, V̂ with `groups` heads, and the queries and output columns to match; fp32. Equal heads merge without loss."""
    a, seen = attention, statistics.shrunk(attention.projections).to(attention.k.device)
    repeats, moment = len(a.q) // a.num_kv_heads, seen.with_constant
    # As large as a QK-norm makes them.
    q, q_sizes = expected_rows(augmented(a.q, a.q_bias), a.q_norm, moment)
    k, k_sizes = expected_rows(augmented(a.k, a.k_bias), a.k_norm, moment)  # [G, D, E + 1]
    q, v = q.unflatten(0, (-1, repeats)), augmented(a.v, a.v_bias)  # [G, repeats, D, E + 1]
    o = a.o.double().permute(1, 0, 2).unflatten(0, (-1, repeats))  # [G, repeats, E, D]
    importance = seen.attended.importance(IN_MERGES).sqrt().expand(len(a.q), 1, 1).unflatten(0, (-1, repeats))
    columns, parts = (importance * o).flatten(1, 2), _parts(a, importance * q, k, seen)
    of_values = _Blocks.of(v, columns.mT @ columns, seen.attended.read_with_constant)
    queries, keys, outputs, values = [], [], [], []
    for heads in torch.arange(a.num_kv_heads).view(groups, -1).tolist():
        shared = [part.shared(heads, q[heads][:, :, dims]) for dims, part in parts]
        queries.append(torch.cat([of_part for of_part, _ in shared], 2))
        keys.append(torch.cat([key for _, key in shared]))
        back, value = of_values.merged(heads)
        outputs.append(o[heads] @ back[:, None])
        values.append(value)
    k_norm = merged_norm(a.k_norm, lambda rows: rows.float().unflatten(0, (groups, -1)).mean(1))
    q = _before(a.q_norm, torch.stack(queries).flatten(0, 2), q_sizes).float()
    k = _before(k_norm, torch.stack(keys), k_sizes.unflatten(0, (groups, -1)).mean(1)).float()
    v = torch.stack(values).float()
    return replace(
        a,
        q=q[..., :-1],
        k=k[..., :-1],
        v=v[..., :-1],
        o=torch.stack(outputs).flatten(0, 2).permute(1, 0, 2).float(),
        q_bias=None if a.q_bias is None else q[..., -1],
        k_bias=None if a.k_bias is None else k[..., -1],
        v_bias=None if a.v_bias is None else v[..., -1],
        k_norm=k_norm,
    )


def _parts(a: Attention, q: torch.Tensor, k: torch.Tensor, seen: Statistics) -> list[tuple[slice, _Blocks | _Numbers]]:
    """The rotary dims and the nope dims of keys, if there are any, prepared for merging in any groups."""
    moment, rope, parts = seen.of_queries, a.rotary.dims if a.rotary else 0, list[tuple[slice, _Blocks | _Numbers]]()
    if moment.ndim == 3:  # of projections
        moment = moment.unflatten(0, q.shape[:2])

    def power(rows: torch.Tensor) -> torch.Tensor:
        """`[G, …]`, the mean square of queries' `rows [G, repeats, …, E + 1]`, summed over the heads of a group."""
        return ((rows @ moment) * rows).sum(-1).sum(1)

    if a.rotary:
        of_pairs, keys = a.rotary.to_complex(power(q[:, :, :rope]))[0], a.rotary.to_complex(k[:, :rope])[0]
        moved = rotated_moments(a, k[:, :rope], seen)
        parts.append((slice(rope), _Numbers.of(keys, moved, of_pairs.real + of_pairs.imag, a.rotary)))
    if rope < k.shape[1]:
        rest, keys, within = q[:, :, rope:], k[:, rope:], seen.attended.within_with_constant
        # Behind a norm, dims cannot be mixed.
        blocks = _Blocks.of(keys, (rest @ moment @ rest.mT).sum(1), within) if a.k_norm is None else None
        parts.append((slice(rope, None), blocks or _Numbers.of(keys, keys @ within, power(rest))))
    return parts


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
