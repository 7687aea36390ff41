"""What tests of methods that make a latent share: full sizes, and records with an exact answer."""

from __future__ import annotations

import dataclasses

import torch
from records import inputs, measured, random

from attention.record import Attention, FactoredAttention
from attention.rope import Pairing
from convert.methods import load_latent
from convert.methods.latent import Allocation
from convert.methods.statistics import Statistics
from convert.methods.svd import losses

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


def rotary_dims(a: Attention) -> int:
    return a.rotary.dims


def every_pair(a: Attention) -> tuple[int, ...]:
    return tuple(pair for pair in range(rotary_dims(a) // 2) for _ in range(a.num_kv_heads))


def full_rank(a: Attention, pairs: tuple[int, ...]) -> int:
    return min(a.q.shape[2], 2 * a.k.shape[0] * a.k.shape[1] - 2 * len(pairs))


def factor(name: str, a: Attention, size: Allocation, x: torch.Tensor | None = None) -> FactoredAttention:
    """By a method, with the statistics of `x`."""
    return load_latent(name).factor(a, size, measured(inputs(a.q.shape[2]) if x is None else x))


def energies(a: Attention) -> torch.Tensor:
    """What `svd` allocates by."""
    return losses(a, Statistics.assumed(a.q.shape[2]))


def turned_copies(a: Attention) -> Attention:
    """Every KV head's key is the first one's, each frequency rotated by an angle and scaled by a factor of its own."""
    numbers, bias = a.rotary.to_complex(a.k)[0], a.rotary.to_complex(a.k_bias)[0]
    rotation = torch.complex(*random(2, a.num_kv_heads, numbers.shape[1], seed=3))
    k = a.rotary.from_complex(rotation[..., None] * numbers[:1])
    return dataclasses.replace(a, k=k, k_bias=a.rotary.from_complex(rotation * bias[:1]))


def unturning(a: FactoredAttention, share: int) -> torch.Tensor:
    """Unrotated keys and values as the latent gives them, one row per dim of each KV head."""
    return torch.cat((a.up_k[::share] @ a.down, a.up_v[::share] @ a.down)).flatten(0, 1).double()
