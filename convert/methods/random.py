"""`random`: fresh K and V heads, the control of the GQA paper (arXiv 2305.13245). It keeps nothing of the source's heads."""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.record import Attention
from convert.methods.grouped import Draw, GroupedMethod, merged_norm
from convert.methods.statistics import Statistics
from convert.methods.text import TextUse


def merge(attention: Attention, groups: int, draw: Draw, statistics: Statistics) -> Attention:
    """K̂_g, V̂_g ~ N(0, initializer_range²), biases 0, gains of merged key norms 1, as in a new layer."""

    def fresh(rows: torch.Tensor) -> torch.Tensor:
        # Drawn on the CPU in fp32 whatever the device and dtype, so that a seed gives the same weights everywhere.
        normal = torch.randn(groups, *rows.shape[1:], generator=draw.generator)
        return (normal * draw.initializer_range).to(rows.device)

    def zeros(rows: torch.Tensor | None) -> torch.Tensor | None:
        return None if rows is None else rows.new_zeros(groups, *rows.shape[1:])

    norm = merged_norm(attention.k_norm, lambda rows: rows.new_zeros(groups, *rows.shape[1:]))
    if norm is not None and norm is not attention.k_norm:
        norm = replace(norm, gain=norm.gain + (1 - norm.gain_offset))
    return replace(
        attention,
        k=fresh(attention.k),
        v=fresh(attention.v),
        k_bias=zeros(attention.k_bias),
        v_bias=zeros(attention.v_bias),
        k_norm=norm,
    )


METHOD = GroupedMethod(
    "random", "fresh random heads (a control: expect a ruined model)", "arXiv:2305.13245", TextUse.IGNORED, merge
)
