"""Four projections with the heads stacked in their output rows: what layouts with separate projections share.

All names are those in the attention's module: "q_proj.weight".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attention.record import Attention, Projections
from attention.spec import AttentionSpec

if TYPE_CHECKING:
    import torch

    from attention.rope import Rotary


def projection_shapes(
    spec: AttentionSpec, width: int, qkv_bias: bool, o_bias: bool, o_name: str = "o_proj"
) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name; E = `width`."""
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, count in heads.items():
        shapes[f"{name}.weight"] = (count * spec.head_dim, width)
        if qkv_bias:
            shapes[f"{name}.bias"] = (count * spec.head_dim,)
    shapes[f"{o_name}.weight"] = (width, spec.num_heads * spec.head_dim)
    if o_bias:
        shapes[f"{o_name}.bias"] = (width,)
    return shapes


def split_projections(
    local: Mapping[str, torch.Tensor], head_dim: int, scale: float, rotary: Rotary | None, o_name: str = "o_proj"
) -> Attention:
    """The record of these tensors, as views, without norms."""
    depth = (-1, head_dim)  # [heads * D, …] -> [heads, D, …]
    bias = {part: local[f"{part}_proj.bias"].unflatten(0, depth) for part in "qkv" if f"{part}_proj.bias" in local}
    return Attention(
        q=local["q_proj.weight"].unflatten(0, depth),
        k=local["k_proj.weight"].unflatten(0, depth),
        v=local["v_proj.weight"].unflatten(0, depth),
        o=local[f"{o_name}.weight"].unflatten(1, depth),
        scale=scale,
        rotary=rotary,
        q_bias=bias.get("q"),
        k_bias=bias.get("k"),
        v_bias=bias.get("v"),
        o_bias=local.get(f"{o_name}.bias"),
    )


def join_projections(a: Attention, o_name: str = "o_proj") -> dict[str, torch.Tensor]:
    """The inverse of `split_projections`."""
    local = join_heads(a)
    local[f"{o_name}.weight"] = a.o.flatten(1)
    if a.o_bias is not None:
        local[f"{o_name}.bias"] = a.o_bias
    return local


def join_heads(a: Attention | Projections) -> dict[str, torch.Tensor]:
    """The projections of queries, keys and values, with the heads stacked in their output rows."""
    local = {f"{part}_proj.weight": rows.flatten(0, 1) for part, rows in (("q", a.q), ("k", a.k), ("v", a.v))}
    biases = (("q", a.q_bias), ("k", a.k_bias), ("v", a.v_bias))
    return local | {f"{part}_proj.bias": rows.flatten() for part, rows in biases if rows is not None}
