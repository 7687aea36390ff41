"""Decoding over keys and values that groups of query heads share, in Triton: one read per group. See `split_kv`."""

from __future__ import annotations

import torch

from attention.kernels import split_kv
from attention.kernels.operand import operand
from attention.kernels.tiling import Tiling, choose, machine


def gqa_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`attention.kernels.decode_grouped` without its checks. Each KV head is one request of H / G query heads.

    Args:
        query: `[B, H, 1, D]`.
        keys: `[B, G, S, D]`; its strides let B and G be one dim, and the last is 1; or `Stored` of such tensors, like `values`.
        values: `[B, G, S, Dv]`, likewise; Dv a multiple of 16.
        mask: None, or bool or floating `[B or 1, 1, 1, S]` of any strides.
        scaling: The factor of the scores.
        tiling: Sizes to use instead of those that `attention.kernels.tiling` chooses for H / G heads, rank Dv and rope D.

    Returns:
        `[B, H, 1, Dv]`, contiguous.
    """
    batch, groups, _, dim = keys.shape
    shared, rank = query.shape[1] // groups, values.shape[3]
    tiling = tiling or choose(shared, rank, dim, query.element_size(), machine(query.device))
    assert tiling is not None
    rows = query.reshape(batch * groups, shared, 1, dim)
    with torch.cuda.device_of(query):
        out = split_kv.decode(None, rows, operand(values), operand(keys), mask, scaling, tiling, groups)
    return out.view(batch, groups * shared, 1, rank)
