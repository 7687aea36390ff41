"""Stacked projections, here CodeGen's four blocks: split and join are inverse, and heads are where the class has them."""

from __future__ import annotations

import torch
from alike import comes_back
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_config, tiny_model

from convert.families import FAMILIES

CODEGEN = FAMILIES["codegen"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    share=st.integers(1, 3),
    dim=st.integers(2, 7),
    layer=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_join_is_the_inverse_of_split(share: int, dim: int, layer: int, dtype: torch.dtype) -> None:
    config = tiny_config("codegen", num_attention_heads=4 * share, hidden_size=4 * share * dim, rotary_dim=2)
    record = comes_back(CODEGEN, config, layer, dtype)
    assert record.q.shape == record.k.shape == record.v.shape == (4 * share, dim, 4 * share * dim)


def test_a_block_has_queries_then_values_then_keys() -> None:
    model = tiny_model(tiny_config("codegen"))
    weight = model.transformer.h[1].attn.qkv_proj.weight
    weight.data.copy_(torch.arange(len(weight))[:, None].expand_as(weight))  # every row says where it is
    name = "transformer.h.1.attn"
    tensors = {f"{name}.qkv_proj.weight": weight, f"{name}.out_proj.weight": model.transformer.h[1].attn.out_proj.weight}
    record = CODEGEN.split(tensors, model.config, 1)
    first = torch.arange(8) // 2 * 48 + torch.arange(8) % 2 * 8  # 2 heads of 8 dims in a block of 48 rows
    assert record.q[:, 0, 0].tolist() == first.tolist()
    assert record.v[:, 0, 0].tolist() == (first + 16).tolist()
    assert record.k[:, 0, 0].tolist() == (first + 32).tolist()


def test_heads_that_do_not_divide_into_blocks_are_unreadable() -> None:
    assert CODEGEN.unreadable(tiny_config("codegen")) is None
    message = "its projections have 4 blocks of equally many heads, and num_attention_heads is 2"
    assert CODEGEN.unreadable(tiny_config("codegen", num_attention_heads=2)) == message
