"""`mean`: every group shares the mean of its members' K and V heads (GQA paper, arXiv 2305.13245)."""

from __future__ import annotations

import torch

from attention.record import Attention
from convert.methods.grouped import GroupedMethod, pool_kv
from convert.methods.statistics import Statistics
from convert.methods.text import TextUse


def _mean(members: torch.Tensor) -> torch.Tensor:
    # Relative to the first member, so that equal members give exactly the same head whatever their number.
    return members[0] + (members - members[0]).mean(0)


def merge(attention: Attention, groups: int, statistics: Statistics) -> Attention:
    """K̂_g = mean over the group of K_i, and likewise V and the biases; fp32. Equal heads merge without loss."""
    return pool_kv(attention, groups, _mean)


METHOD = GroupedMethod("mean", "mean of each group's heads", "arXiv:2305.13245", TextUse.IGNORED, merge)
