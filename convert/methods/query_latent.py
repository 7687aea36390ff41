"""Queries through a latent of lower rank, by what logits depend on.

A change Δ of a head's queries costs E_t Var_{s ~ p_t}(Δq_tᵀ φ_ts), with φ_ts the keys as token t sees them: queries are weighed
by the covariance M_h of what they meet on one side, and by that of inputs on the other. The latent is the truncated SVD of
[M_h^½ W_h] Σ^½, all heads stacked. A bias that queries ride on takes up the mean of what truncation removes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.record import FactoredAttention
from convert.methods.algebra import augmented, floored, leading_subspace, roots
from convert.methods.blocks import Blocks
from convert.methods.statistics import Attended

_LEAST = 1e-6  # of the largest weight of a query
_NOTHING = 1e-9  # of the size of the largest channel


def truncated(record: FactoredAttention, rank: int, inputs: torch.Tensor, met: torch.Tensor) -> FactoredAttention:
    """The record with queries that read a latent of Q = `rank` channels; their biases are not channels of it.

    Args:
        record: Its queries read the input.
        rank: Q.
        inputs: `[E + 1, E + 1]`, the second moment of (x, 1).
        met: `[H, N + P, N + P]`, the covariance of what each head's queries meet, nope dims first.
    """
    rows = torch.cat((augmented(record.q_nope, record.q_nope_bias), augmented(record.q_rope, record.q_rope_bias)), 1)
    queries, bias = rows[..., :-1], rows[..., -1]
    down, up = _factored(queries, rank, inputs, met)
    bias = bias + (queries - up @ down) @ inputs[:-1, -1]
    nope = record.q_nope.shape[1]
    return replace(
        record,
        q_nope=up[:, :nope].float(),
        q_rope=up[:, nope:].float(),
        q_nope_bias=bias[:, :nope].float(),
        q_rope_bias=bias[:, nope:].float(),
        q_down=down.float(),
    )


def behind_norm(record: FactoredAttention, gain: torch.Tensor, sample: Blocks) -> tuple[FactoredAttention, float]:
    """The record with queries that read the input without the gains of its RMSNorm: another norm changes next to nothing.

    Args:
        record: Its queries read the input, and have no biases.
        gain: `[E]`. A channel whose gain is zero is always zero, and left out.
        sample: The layer's inputs.

    Returns:
        The record, whose queries make up for the mean size of what they read, and how far tokens are from that size (root mean
        square).
    """
    # What bfloat16 holds, the other dtypes hold, too; queries make up for the rounding.
    down = torch.where(gain == 0, 0, 1 / gain).bfloat16().to(record.q_nope)
    sizes = torch.cat([(block.to(down) * down).square().mean(-1).sqrt() for block in sample.blocks])
    mean = sizes.square().mean().sqrt()
    scale = torch.where(down == 0, 0, mean / down)
    found = replace(record, q_nope=record.q_nope * scale, q_rope=record.q_rope * scale, q_down=down.diag())
    return found, float((sizes / mean - 1).square().mean().sqrt())


def _factored(queries: torch.Tensor, rank: int, inputs: torch.Tensor, met: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[Q, E]` and `[H, N + P, Q]`, whose product is closest to `queries [H, N + P, E]`; channels without use are zero."""
    heads, dims, width = queries.shape
    if rank >= width:  # nothing to lose
        return _padded(torch.eye(width).to(queries), rank, 0), _padded(queries, rank, 2)
    mean = inputs[:-1, -1]
    weigh, unweigh = roots(met, _LEAST)
    weighted, used = (weigh @ queries).flatten(0, 1), min(rank, heads * dims)
    left = leading_subspace(weighted, inputs[:-1, :-1] - torch.outer(mean, mean), used).double()
    down, up = left.T @ weighted, unweigh @ left.unflatten(0, (heads, dims))
    # The norm of the class, which constants switch off, is exact for channels of about size one.
    size = floored(((down @ inputs[:-1, :-1]) * down).sum(1).clamp_min(0).sqrt(), _NOTHING)
    return _padded(down / size[:, None], rank, 0), _padded(up * size, rank, 2)


def _padded(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    missing = list(tensor.shape)
    missing[dim] = size - missing[dim]
    return torch.cat((tensor, tensor.new_zeros(missing)), dim)


def expected_met(record: FactoredAttention, attended: Attended) -> torch.Tensor:
    """The second moment of keys that queries meet, `[H, N + P, N + P]`, for rotations independent of each other."""
    up, latent = record.up_k.double(), record.down.double() @ attended.within @ record.down.double().T
    key = augmented(record.k_rope[None], None if record.k_rope_bias is None else record.k_rope_bias[None])
    pairs, _ = record.rotary.to_complex(key)  # [1, P/2, E + 1]
    energy = ((pairs @ attended.seen_with_constant.to(pairs)) * pairs.conj()).sum(-1).real / 2
    of_rope = record.rotary.from_complex(torch.complex(energy, energy))[0].diag()
    return joined_met(up @ latent @ up.mT, of_rope.expand(len(up), -1, -1))


def joined_met(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`[H, N + P, N + P]` of `[H, N, N]` and `[H, P, P]`, parts with and without positions apart."""
    dims = nope.shape[1]
    met = nope.new_zeros(len(nope), dims + rope.shape[1], dims + rope.shape[1])
    met[:, :dims, :dims], met[:, dims:, dims:] = nope, rope
    return met
