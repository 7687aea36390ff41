"""`mean`: every group shares the mean of its members' K and V heads, fp32 (GQA paper, arXiv 2305.13245)."""

from dataclasses import replace

import torch

from attention.record import Attention
from convert.methods.grouped import GroupedMethod, merged_norm
from convert.methods.statistics import Statistics
from convert.methods.text import TextUse


def merge(a: Attention, groups: int, statistics: Statistics) -> Attention:
    """K, V, their biases and the gains of the key norm, averaged within each group, in fp32."""

    def merged(rows: torch.Tensor) -> torch.Tensor:
        parts = (members.float() for members in rows.unflatten(0, (groups, -1)))  # one fp32 copy at a time
        # Relative to the first member, so that equal members give exactly the same head whatever their number.
        return torch.stack([members[0] + (members - members[0]).mean(0) for members in parts])

    k_bias, v_bias = (None if bias is None else merged(bias) for bias in (a.k_bias, a.v_bias))
    return replace(a, k=merged(a.k), v=merged(a.v), k_bias=k_bias, v_bias=v_bias, k_norm=merged_norm(a.k_norm, merged))


METHOD = GroupedMethod("mean", "mean of each group's heads", "arXiv:2305.13245", TextUse.IGNORED, merge)
