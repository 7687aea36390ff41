"""The base of all methods that merge KV heads: signature, registry entry, merged gains.

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


def merged_norm(norm: QKNorm | None, merged: Callable[[torch.Tensor], torch.Tensor]) -> QKNorm | None:
    """The key norm of merged heads: shared gains stay, per-head gains are merged like their heads."""
    if norm is None or not norm.per_head_gains:
        return norm
    return replace(norm, gain=merged(norm.gain), bias=None if norm.bias is None else merged(norm.bias))
