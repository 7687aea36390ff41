"""What every method of merging KV heads has in common: its signature, its registry entry, pooling within groups.

A method is a pure function of one layer's record. It sees no names, files, configs or command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attention.qk_norm import QKNorm
from convert.record import Attention


@dataclass(frozen=True)
class Draw:
    """Where a method that needs chance takes it from: one generator per layer, and the width of a fresh weight."""

    generator: torch.Generator
    initializer_range: float


@dataclass(frozen=True)
class GroupedMethod:
    """A registry entry.

    Attributes:
        name: As on the command line.
        summary: One line for help, plans and cards.
        source: The paper, or "".
        absorbs: Whether queries take up what keys lose, which a norm of both forbids.
        merge: `(attention with G KV heads, groups, draw) -> attention with `groups` KV heads`; groups divides G.
    """

    name: str
    summary: str
    source: str
    absorbs: bool
    merge: Callable[[Attention, int, Draw], Attention]


Pool = Callable[[torch.Tensor], torch.Tensor]


def pool_kv(attention: Attention, groups: int, pool: Pool) -> Attention:
    """Merge adjacent KV heads by one rule for everything that has a row per KV head: K, V, their biases, their norm.

    What is merged comes back in fp32, to be cast once, when it is written.

    Args:
        attention: Its k and v are `[G, D, E]`.
        groups: How many KV heads remain; divides G.
        pool: Makes one head of a group's, fp32 `[G / groups, …]`.
    """

    def merged(rows: torch.Tensor) -> torch.Tensor:
        # Group by group: what is copied to fp32 stays small.
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
    """The key norm of merged heads: shared gains stay, gains of their own are merged like the heads they belong to."""
    if norm is None or not norm.per_head_gains:
        return norm
    return replace(norm, gain=merged(norm.gain), bias=None if norm.bias is None else merged(norm.bias))
