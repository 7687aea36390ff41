"""`mean`: every group shares the mean of its members' K and V heads, fp32 (GQA paper, arXiv 2305.13245)."""

import torch

from convert.methods.grouped import GroupedMethod, pooling
from convert.methods.text import TextUse


def _mean(members: torch.Tensor) -> torch.Tensor:
    # Relative to the first member, so that equal members give exactly the same head whatever their number.
    return members[0] + (members - members[0]).mean(0)


METHOD = GroupedMethod("mean", "mean of each group's heads", "arXiv:2305.13245", TextUse.IGNORED, pooling(_mean))
