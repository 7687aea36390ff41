"""The base of all methods that merge KV heads: signature, registry entry, pooling within groups.

A method is a pure function of one layer's record. It sees no names, files, configs or command line.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attention.qk_norm import QKNorm
from attention.record import Attention
from convert.methods.statistics import Statistics
from convert.methods.text import Method


@dataclass(frozen=True)
class GroupedMethod(Method):
    """The registry entry of a method that merges KV heads.

    Attributes:
        merge: `(attention with G KV heads, groups, statistics) -> attention with `groups` KV heads`, merges neighbours; groups
            divides G.
    """

    merge: Callable[[Attention, int, Statistics], Attention]


def pooling(pool: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Attention, int, Statistics], Attention]:
    """What merges adjacent KV heads by one rule for everything that has a row per KV head: K, V, their biases, the key norm.

    Merged tensors are fp32; they are cast once, when they are written.

    Args:
        pool: Merges the heads of one group, fp32 `[G / groups, …]`, into one.
    """

    def merge(a: Attention, groups: int, statistics: Statistics) -> Attention:
        def merged(rows: torch.Tensor) -> torch.Tensor:
            # Group by group, so that the fp32 copy stays small.
            return torch.stack([pool(members.float()) for members in rows.unflatten(0, (groups, -1))])

        k_bias, v_bias = (None if bias is None else merged(bias) for bias in (a.k_bias, a.v_bias))
        return replace(a, k=merged(a.k), v=merged(a.v), k_bias=k_bias, v_bias=v_bias, k_norm=merged_norm(a.k_norm, merged))

    return merge


def merged_norm(norm: QKNorm | None, merged: Callable[[torch.Tensor], torch.Tensor]) -> QKNorm | None:
    """The key norm of merged heads: shared gains stay, per-head gains are merged like their heads."""
    if norm is None or not norm.per_head_gains:
        return norm
    return replace(norm, gain=merged(norm.gain), bias=None if norm.bias is None else merged(norm.bias))
