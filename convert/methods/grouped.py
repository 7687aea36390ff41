"""The base of all methods that merge KV heads: signature, registry entry, pooling within groups.

A method is a pure function of one layer's record. It sees no names, files, configs or command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attention.qk_norm import QKNorm
from attention.record import Attention, LatentProjections
from convert.methods.statistics import Statistics
from convert.methods.text import Method


@dataclass(frozen=True)
class Draw:
    """Random numbers for a method: one seeded generator per layer, and the standard deviation of a fresh weight."""

    generator: torch.Generator
    initializer_range: float

    @classmethod
    def of_layer(cls, seed: int, layer: int, initializer_range: float) -> Draw:
        """Seeded per layer, so that a resumed run draws the same numbers as an uninterrupted one."""
        return cls(torch.Generator().manual_seed(seed * 100_003 + layer), initializer_range)


@dataclass(frozen=True)
class GroupedMethod(Method):
    """The registry entry of a method that merges KV heads.

    Attributes:
        merge: `(attention with G KV heads, groups, draw, statistics) -> attention with `groups` KV heads`, merges neighbours;
            groups divides G.
        partition: `(attention, groups, statistics) -> order of KV heads` in which those that lose least are together, or None.
    """

    merge: Callable[[Attention, int, Draw, Statistics], Attention]
    partition: Callable[[Attention, int, Statistics], list[int]] | None = None


Pool = Callable[[torch.Tensor], torch.Tensor]


def pool_kv(attention: Attention, groups: int, pool: Pool) -> Attention:
    """Merge adjacent KV heads by one rule for everything that has a row per KV head: K, V, their biases, the key norm.

    Merged tensors are fp32; they are cast once, when they are written.

    Args:
        attention: The record; its k and v are `[G, D, E]`.
        groups: KV heads of the result; divides G.
        pool: Merges the heads of one group, fp32 `[G / groups, …]`, into one.
    """

    def merged(rows: torch.Tensor) -> torch.Tensor:
        # Group by group, so that the fp32 copy stays small.
        return torch.stack([pool(members.float()) for members in rows.unflatten(0, (groups, -1))])

    return replace(
        attention,
        k=merged(attention.k),
        v=merged(attention.v),
        k_bias=None if attention.k_bias is None else merged(attention.k_bias),
        v_bias=None if attention.v_bias is None else merged(attention.v_bias),
        k_norm=merged_norm(attention.k_norm, merged),
    )


def merged_norm(norm: QKNorm | None, merged: Callable[[torch.Tensor], torch.Tensor]) -> QKNorm | None:
    """The key norm of merged heads: shared gains stay, per-head gains are merged like their heads."""
    if norm is None or not norm.per_head_gains:
        return norm
    return replace(norm, gain=merged(norm.gain), bias=None if norm.bias is None else merged(norm.bias))


def queries_of(attention: Attention, order: list[int]) -> list[int]:
    """The query heads that read KV heads in this order."""
    repeats = attention.q.shape[0] // attention.num_kv_heads
    return [head * repeats + i for head in order for i in range(repeats)]


def reordered(attention: Attention, order: list[int]) -> Attention:
    """The same attention with its KV heads in another order; their query heads and output columns move along.

    Behind a source's projections, queries move there, too; keys and values that are projected stay, and those that are made of
    them move.
    """
    a, queries = attention, queries_of(attention, order)
    assert not isinstance(a.projections, LatentProjections), "a latent has no KV heads to put in order"
    return replace(
        a,
        q=a.q[queries],
        k=a.k[order],
        v=a.v[order],
        o=a.o[:, queries],
        q_bias=None if a.q_bias is None else a.q_bias[queries],
        k_bias=None if a.k_bias is None else a.k_bias[order],
        v_bias=None if a.v_bias is None else a.v_bias[order],
        q_norm=None if a.q_norm is None else a.q_norm.of_heads(queries),
        k_norm=None if a.k_norm is None else a.k_norm.of_heads(order),
        projections=None if a.projections is None else a.projections.with_queries(queries),
        sinks=None if a.sinks is None else a.sinks[queries],
    )
