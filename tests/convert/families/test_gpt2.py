"""GPTBigCode: one KV head is a source, and what its class ignores is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latents import same_logits
from tiny import tiny_config
from written import Convert, Logits, Make, edit, ok, weights

from attention.errors import Refusal
from convert.planning.allowed import readable
from eval.inputs.source import Source


def test_one_kv_head_is_a_source(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint("gpt_bigcode", multi_query=True)
    ok(convert("mqa", source, tmp_path / "same", "--force"))
    before, after = weights(source), weights(tmp_path / "same")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ok(convert("mla", source, tmp_path / "latent", "--kv-lora-rank", 16, "--method", "svd"))
    same_logits(logits(tmp_path / "latent"), logits(source))


def test_what_the_class_ignores_is_refused(tmp_path: Path) -> None:
    tiny_config("gpt_bigcode", multi_query=True).save_pretrained(tmp_path)
    message = "sets num_key_value_heads to 4, which gpt_bigcode ignores: its 8 query heads share 1"
    with pytest.raises(Refusal, match=message):
        readable(Source.parse(str(edit(tmp_path, num_key_value_heads=4))))
