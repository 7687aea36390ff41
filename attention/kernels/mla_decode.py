"""Decoding over a cached latent, in Triton: one read serves all heads, scores and outputs alike. See `split_kv`."""

from __future__ import annotations

import torch

from attention.kernels import split_kv
from attention.kernels.operand import operand
from attention.kernels.tiling import Tiling, choose, machine


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`attention.kernels.decode` for one query per request, without its checks.

    Args:
        q_latent: `[B, H, 1, R]`, R a multiple of 16.
        q_rope: `[B, H, 1, P]`.
        latent: `[B, S, R]`, any strides but 1 in the last dim; or, as a `Stored` is, `[B, 1, S, R]`.
        k_rope: `[B, S, P]`, likewise.
        mask: None, or bool or floating `[B or 1, 1, 1, S]` of any strides.
        scaling: The factor of the scores.
        tiling: Sizes to use instead of those that `attention.kernels.tiling` chooses, for tests and measurements.

    Returns:
        `[B, H, 1, R]`, contiguous.
    """
    heads, rank = q_latent.shape[1], q_latent.shape[3]
    tiling = tiling or choose(heads, rank, q_rope.shape[3], q_rope.element_size(), machine(q_rope.device))
    assert tiling is not None
    held, turned = (operand(part if part.ndim == 4 else part[:, None]) for part in (latent, k_rope))
    with torch.cuda.device_of(q_rope):
        return split_kv.decode(q_latent, q_rope, held, turned, mask, scaling, tiling)
