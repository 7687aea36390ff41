"""GPTBigCode: one KV head is a source, and what its class ignores is refused."""

from __future__ import annotations

from pathlib import Path

import torch
from latents import same_logits
from written import Convert, Logits, Make, edit, left_nothing, ok, weights


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
