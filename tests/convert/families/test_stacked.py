"""Stacked projections, here CodeGen's four blocks: split and join are inverse, and heads are where the class has them."""

from __future__ import annotations

import torch
from tiny import tiny_config, tiny_model

from convert.families import FAMILIES

CODEGEN = FAMILIES["codegen"]


def test_a_block_has_queries_then_values_then_keys() -> None:
    model = tiny_model(tiny_config("codegen"))
    weight = model.transformer.h[1].attn.qkv_proj.weight
    weight.data.copy_(torch.arange(len(weight))[:, None].expand_as(weight))  # every row says where it is
    name = "transformer.h.1.attn"
    tensors = {f"{name}.qkv_proj.weight": weight, f"{name}.out_proj.weight": model.transformer.h[1].attn.out_proj.weight}
    record = CODEGEN.of(model.config).split(tensors, 1)
    first = torch.arange(8) // 2 * 48 + torch.arange(8) % 2 * 8  # 2 heads of 8 dims in a block of 48 rows
    assert record.q[:, 0, 0].tolist() == first.tolist()
    assert record.v[:, 0, 0].tolist() == (first + 16).tolist()
    assert record.k[:, 0, 0].tolist() == (first + 32).tolist()
