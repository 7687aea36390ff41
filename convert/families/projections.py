"""Four projections with the heads stacked in their output rows, and those of latent attention: what several layouts share.

All names are those in the attention's module: "q_proj.weight".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attention.record import Attention, FactoredAttention

if TYPE_CHECKING:
    import torch

    from attention.rope import Rotary


PARTS = ("q_proj", "k_proj", "v_proj")
NAMES = (*PARTS, "o_proj")


def split_projections(
    local: Mapping[str, torch.Tensor], head_dim: int, scale: float, rotary: Rotary | None, names: Sequence[str] = NAMES
) -> Attention:
    """The record of these tensors, as views, without norms."""
    depth, (*parts, o_name) = (-1, head_dim), names  # [heads * D, …] -> [heads, D, …]
    q, k, v = (local[f"{name}.weight"].unflatten(0, depth) for name in parts)
    biases = (local.get(f"{name}.bias") for name in parts)
    q_bias, k_bias, v_bias = (None if bias is None else bias.unflatten(0, depth) for bias in biases)
    o, o_bias = local[f"{o_name}.weight"].unflatten(1, depth), local.get(f"{o_name}.bias")
    return Attention(q, k, v, o, scale, rotary, q_bias, k_bias, v_bias, o_bias)


def join_projections(a: Attention, names: Sequence[str] = NAMES) -> dict[str, torch.Tensor]:
    """The inverse of `split_projections`."""
    assert a.sinks is None, "sinks are no projections, and would be lost"
    *parts, o_name = names
    local = join_heads(a, parts) | {f"{o_name}.weight": a.o.flatten(1)}
    return local if a.o_bias is None else local | {f"{o_name}.bias": a.o_bias}


def join_heads(a: Attention, names: Sequence[str] = PARTS) -> dict[str, torch.Tensor]:
    """The projections of queries, keys and values, with the heads stacked in their output rows."""
    local = {f"{name}.weight": rows.flatten(0, 1) for name, rows in zip(names, (a.q, a.k, a.v), strict=True)}
    biases = zip(names, (a.q_bias, a.k_bias, a.v_bias), strict=True)
    return local | {f"{name}.bias": rows.flatten() for name, rows in biases if rows is not None}


def join_factors(a: FactoredAttention, rank: int) -> dict[str, torch.Tensor]:
    """`{q_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj}` of a latent of `rank` channels, without biases but those of queries."""
    import torch

    missing = rank - len(a.down)
    down, up = torch.nn.functional.pad(a.down, (0, 0, 0, missing)), torch.cat((a.up_k, a.up_v), 1)
    local = {
        "q_proj.weight": torch.cat((a.q_nope, a.q_rope), 1).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat((down, a.k_rope)),
        "kv_b_proj.weight": torch.nn.functional.pad(up, (0, missing)).flatten(0, 1),
        "o_proj.weight": a.o.flatten(1),
    }
    if a.q_nope_bias is not None and a.q_rope_bias is not None:
        local["q_proj.bias"] = torch.cat((a.q_nope_bias, a.q_rope_bias), 1).flatten()
    return local


def or_zeros(bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The bias, or zeros of the shape of `like`."""
    return like.new_zeros(like.shape) if bias is None else bias
