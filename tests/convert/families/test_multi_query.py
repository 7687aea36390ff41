"""GPTBigCode: one KV head or as many as query heads, in two layouts of one tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from alike import comes_back
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import same_logits
from tiny import layer_tensors, tiny_config, tiny_model
from written import Convert, Logits, Make, edit, left_nothing, ok, weights

from attention.reference import grouped_attention
from convert.families import FAMILIES

FAMILY = FAMILIES["gpt_bigcode"]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_join_is_the_inverse_of_split(data: st.DataObject) -> None:
    heads, dim = data.draw(st.integers(1, 6), "heads"), data.draw(st.integers(1, 9), "head dim")
    config = tiny_config(
        "gpt_bigcode",
        num_attention_heads=heads,
        hidden_size=heads * dim,
        multi_query=data.draw(st.booleans(), "multi_query"),
        scale_attn_weights=data.draw(st.booleans(), "scale_attn_weights"),
    )
    record = comes_back(FAMILY, config)
    assert (len(record.q), len(record.k)) == (heads, 1 if config.multi_query else heads)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("multi_query", [True, False])
def test_the_record_computes_what_the_class_computes(multi_query: bool, scaled: bool) -> None:
    model = tiny_model(tiny_config("gpt_bigcode", multi_query=multi_query, scale_attn_weights=scaled)).double()
    model.set_attn_implementation("sdpa")  # eager attention has its softmax in fp32
    record = FAMILY.split(layer_tensors(model, FAMILY, 1), model.config, 1)
    x = torch.randn(2, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.inference_mode():
        expected = model.transformer.h[1].attn(x, attention_mask=mask)[0]
        found = grouped_attention(x, record)
    assert float((found - expected).abs().max()) < 1e-9


def test_one_kv_head_is_a_source(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint("gpt_bigcode", multi_query=True)
    ok(convert("mqa", source, tmp_path / "same", "--force"))
    before, after = weights(source), weights(tmp_path / "same")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ok(convert("mla", source, tmp_path / "latent", "--kv-lora-rank", 16, "--method", "svd"))
    same_logits(logits(tmp_path / "latent"), logits(source))


def test_kv_heads_that_the_class_ignores_are_refused(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = edit(checkpoint("gpt_bigcode", multi_query=True), num_key_value_heads=4)
    message = "sets num_key_value_heads to 4, which gpt_bigcode ignores: its 8 query heads share 1"
    left_nothing(convert("mqa", source, tmp_path / "out"), 2, message, tmp_path / "out")
    refused = convert("mqa", checkpoint("gpt_bigcode", name="crossing", add_cross_attention=True), tmp_path / "out")
    left_nothing(refused, 2, "it has cross-attention (add_cross_attention)", tmp_path / "out")
