"""GPTBigCode: one KV head or as many as query heads, in two layouts of one tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from alike import comes_back
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import same_logits
from tiny import tiny_config
from written import Convert, Logits, Make, edit, left_nothing, ok, weights

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


def test_one_kv_head_is_a_source(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint("gpt_bigcode", multi_query=True)
    ok(convert("mqa", source, tmp_path / "same"))
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
