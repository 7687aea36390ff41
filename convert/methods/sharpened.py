"""Moves rotary queries of latents away from their mean, in proportion to what outputs lose: the last step of their refit.

Least squares shrink what they cannot predict, so attention is less sharp than the source's, and copies find their places less
well. The mean of queries is not shrunk, and stays: large biases make logits that depend on positions alone. Where KV heads are
shared, the same step costs nats (docs/notes/fits.md).
"""

from dataclasses import replace

import torch

from attention.record import FactoredAttention, Record
from convert.methods.statistics import Statistics

_SHARPER, _MOST = 2.0, 0.06  # the gain of queries: per share of outputs that is lost, and at most
_LOSSLESS = 1e-6  # of outputs: what loses no more is exact
_RIDGE = 1e-4  # of the mean square of what queries read


def sharpened(after: Record, lost: float, seen: Statistics) -> Record:
    """Move the rotary part of queries away from its mean.

    The mean stays without a bias: inputs are far off centre, so a map of them gives a constant.

    Args:
        after: The layer after all fits. One without a latent stays as it is.
        lost: The squared error of its outputs before these were fitted, relative to the source's.
        seen: Statistics of what its queries read.
    """
    if lost <= _LOSSLESS or not isinstance(after, FactoredAttention):
        return after
    gain, moment = min(_SHARPER * lost, _MOST), seen.of_queries
    second, mean = moment[..., :-1, :-1], moment[..., :-1, -1:]
    ridge = (_RIDGE * second.diagonal(dim1=-2, dim2=-1).mean(-1)).clamp_min(1e-30)[..., None, None]
    second = second + ridge * torch.eye(second.shape[-1]).to(second)
    if after.q_down is not None:
        down = after.q_down.double()
        second, mean = down @ second @ down.T, down @ mean
        second = second + (second.diagonal() == 0).to(second).diag()  # channels that are always zero
    one, rows = torch.linalg.solve(second, mean).mT, after.q_rope.double()  # `one` maps inputs to about 1
    return replace(after, q_rope=(rows + gain * (rows - rows @ mean @ one)).float())
