"""Moves rotary queries away from their mean, in proportion to what a layer's outputs lose: the last step of a refit.

Least squares shrink what they cannot predict, so attention is less sharp than the source's, and copies find their places less
well. The mean of queries is not shrunk, and stays: large biases make logits that depend on positions alone.
"""

from dataclasses import replace

import torch

from attention.record import Attention, FactoredAttention, Record
from convert.methods.statistics import Statistics

_SHARPER, _MOST = 2.0, 0.06  # the gain of queries: per share of outputs that is lost, and at most
_LOSSLESS = 1e-6  # of outputs: what loses no more is exact
_RIDGE = 1e-4  # of the mean square of what queries read


def sharpened(after: Record, lost: float, seen: Statistics) -> Record:
    """Move the rotary part of queries away from its mean.

    The mean stays without a bias: inputs are far off centre, so a map of them gives a constant.

    Args:
        after: The layer after all fits. One without rotary dims, or with a norm of its queries, stays as it is.
        lost: The squared error of its outputs before these were fitted, relative to the source's.
        seen: Statistics of what its queries read.
    """
    if lost <= _LOSSLESS or (isinstance(after, Attention) and (after.rotary is None or after.q_norm is not None)):
        return after
    gain, moment = min(_SHARPER * lost, _MOST), seen.of_queries
    second, mean = moment[..., :-1, :-1], moment[..., :-1, -1:]
    ridge = (_RIDGE * second.diagonal(dim1=-2, dim2=-1).mean(-1)).clamp_min(1e-30)[..., None, None]
    second = second + ridge * torch.eye(second.shape[-1]).to(second)
    if isinstance(after, FactoredAttention) and after.q_down is not None:
        down = after.q_down.double()
        second, mean = down @ second @ down.T, down @ mean
        second = second + (second.diagonal() == 0).to(second).diag()  # channels that are always zero
    one = torch.linalg.solve(second, mean).mT  # maps inputs to about 1

    def gained(queries: torch.Tensor) -> torch.Tensor:
        rows = queries.double()
        return (rows + gain * (rows - rows @ mean @ one)).float()

    if isinstance(after, FactoredAttention):
        return replace(after, q_rope=gained(after.q_rope))
    turning, still = after.q.float().tensor_split([after.rotary.dims if after.rotary else 0], 1)
    return replace(after, q=torch.cat((gained(turning), still), 1))
