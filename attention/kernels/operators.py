"""Decoding by Triton's kernels (`split_kv`), and the same as torch operators. Triton is imported by the first call."""

from __future__ import annotations

import torch

from attention.kernels.tiling import Tiling


def mla_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`attention.kernels.decode` for one query per request, without its checks: one read serves all heads.

    Args:
        q_latent: `[B, H, 1, R]`, R a multiple of 16.
        q_rope: `[B, H, 1, P]`.
        latent: `[B, S, R]`, any strides but 1 in the last dim.
        k_rope: `[B, S, P]`, likewise.
        mask: None, or bool or floating `[B or 1, 1, 1, S]` of any strides.
        scaling: The factor of the scores.
        tiling: Sizes to use instead of those that `attention.kernels.tiling` chooses, for tests and measurements.

    Returns:
        `[B, H, 1, R]`, contiguous.
    """
    from attention.kernels import split_kv

    with torch.cuda.device_of(q_rope):
        return split_kv.decode(q_latent, q_rope, latent, k_rope, mask, scaling, tiling)


def gqa_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`attention.kernels.decode_grouped` without its checks. Each KV head is one request of H / G query heads, and read once.

    Args:
        query: `[B, H, 1, D]`.
        keys: `[B, G, S, D]`; its strides let B and G be one dim, and the last is 1.
        values: `[B, G, S, Dv]`, likewise; Dv a multiple of 16.
        mask: None, or bool or floating `[B or 1, 1, 1, S]` of any strides.
        scaling: The factor of the scores.
        tiling: As in `mla_decode`; chosen are those for H / G heads, rank Dv and rope D.

    Returns:
        `[B, H, 1, Dv]`, contiguous.
    """
    from attention.kernels import split_kv

    batch, groups, _, dim = keys.shape
    rows = query.reshape(batch * groups, -1, 1, dim)
    values, keys = (cached.view(-1, *cached.shape[2:]) for cached in (values, keys))
    with torch.cuda.device_of(query):
        out = split_kv.decode(None, rows, values, keys, mask, scaling, tiling, groups)
    return out.view(batch, query.shape[1], 1, -1)


# Custom operators: compiled code calls them as they are and does not trace Triton's launches.
mla = torch.library.custom_op(
    "kvfold::mla_decode",
    mla_decode,
    mutates_args=(),
    schema="(Tensor q_latent, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor? mask, float scaling) -> Tensor",
)
gqa = torch.library.custom_op(
    "kvfold::gqa_decode",
    gqa_decode,
    mutates_args=(),
    schema="(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scaling) -> Tensor",
)
mla.register_fake(lambda q_latent, *_: q_latent.new_empty(q_latent.shape))
gqa.register_fake(lambda query, keys, values, *_: query.new_empty((*query.shape[:3], values.shape[3])))
