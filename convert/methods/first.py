"""`first`: every group shares its first member's K and V head (an ablation of the GQA paper, arXiv 2305.13245)."""

from __future__ import annotations

from attention.record import Attention
from convert.methods.grouped import GroupedMethod, pool_kv
from convert.methods.statistics import Statistics
from convert.methods.text import TextUse


def merge(attention: Attention, groups: int, statistics: Statistics) -> Attention:
    """K̂_g = K of the group's first head, and likewise V and the biases, bit for bit."""
    return pool_kv(attention, groups, lambda members: members[0])


METHOD = GroupedMethod("first", "first head of each group", "arXiv:2305.13245", TextUse.IGNORED, merge)
