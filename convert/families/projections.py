"""Four projections with the heads stacked in their output rows, and those of latent attention: what several layouts share.

All names are those in the attention's module: "q_proj.weight".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from attention.record import Attention, FactoredAttention, HeadProjections
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
    assert a.sinks is None, "sinks are no projections, and would be lost"
    local = join_heads(a)
    local[f"{o_name}.weight"] = a.o.flatten(1)
    if a.o_bias is not None:
        local[f"{o_name}.bias"] = a.o_bias
    return local


def join_heads(a: Attention | HeadProjections) -> dict[str, torch.Tensor]:
    """The projections of queries, keys and values, with the heads stacked in their output rows."""
    local = {f"{part}_proj.weight": rows.flatten(0, 1) for part, rows in (("q", a.q), ("k", a.k), ("v", a.v))}
    biases = (("q", a.q_bias), ("k", a.k_bias), ("v", a.v_bias))
    return local | {f"{part}_proj.bias": rows.flatten() for part, rows in biases if rows is not None}


def split_factors(local: Mapping[str, torch.Tensor], spec: AttentionSpec, scale: float, rotary: Rotary) -> FactoredAttention:
    """The record of a latent's projections (`{q_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj}`), as views."""
    nope, rank, heads = spec.qk_nope_head_dim, local["kv_b_proj.weight"].shape[1], (spec.num_heads, -1)
    queries, up = (local[f"{name}.weight"].unflatten(0, heads) for name in ("q_proj", "kv_b_proj"))
    down, k_bias = local["kv_a_proj_with_mqa.weight"], local.get("kv_a_proj_with_mqa.bias")
    q_bias = local["q_proj.bias"].unflatten(0, heads) if "q_proj.bias" in local else None
    return FactoredAttention(
        q_nope=queries[:, :nope],
        q_rope=queries[:, nope:],
        k_rope=down[rank:],
        down=down[:rank],
        up_k=up[:, :nope],
        up_v=up[:, nope:],
        o=local["o_proj.weight"].unflatten(1, heads),
        scale=scale,
        rotary=rotary,
        q_nope_bias=None if q_bias is None else q_bias[:, :nope],
        q_rope_bias=None if q_bias is None else q_bias[:, nope:],
        k_rope_bias=None if k_bias is None else k_bias[rank:],
        o_bias=local.get("o_proj.bias"),
    )


def join_factors(a: FactoredAttention, rank: int) -> dict[str, torch.Tensor]:
    """The inverse of `split_factors`, in a latent of `rank` channels, without biases but those of queries."""
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


def with_biases(a: Attention) -> Attention:
    """The record with zeros for biases of queries, keys and values that it lacks, for classes that always have them."""
    q, k, v = (or_zeros(bias, rows[..., 0]) for bias, rows in ((a.q_bias, a.q), (a.k_bias, a.k), (a.v_bias, a.v)))
    return replace(a, q_bias=q, k_bias=k, v_bias=v)


def or_zeros(bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The bias, or zeros of the shape of `like`."""
    return like.new_zeros(like.shape) if bias is None else bias
