"""Falcon: its three layouts, its norms, what its class cannot run, and results of its own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import decodes_alike
from tiny import tiny_config
from written import Convert, Logits, Make, damage, ok

from attention import load
from attention.spec import AttentionSpec
from convert.families import family_of
from eval.quality.cost import measured_bytes_per_token

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "one KV head": {"multi_query": True},
    "one for each, in turn": {"parallel_attn": False, "bias": True},
    "some, two norms": {"new_decoder_architecture": True, "num_kv_heads": 4},
    "some, one norm": {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1, "bias": True},
}


@pytest.mark.parametrize("case", [case for case in ARCHITECTURES if case != "one KV head"])
def test_one_head_is_held_by_its_own_class_if_that_has_the_norms(
    case: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint("falcon", **ARCHITECTURES[case])
    ok(convert("mqa", source, tmp_path / "out", "--method", "mean"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == ("kvfold" if case == "some, two norms" else "falcon")
    model = load(tmp_path / "out")
    assert measured_bytes_per_token(model, "float32") == AttentionSpec.from_config(model.config).bytes_per_token("float32")
    assert AttentionSpec.from_config(model.config).kind == "MQA"
    decodes_alike(model, torch.arange(4, 16)[None], static=False)


def test_equal_heads_of_the_grouped_architectures_merge_without_loss(
    checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    """Into kvfold's class for some heads, and its own for one, which then says multi_query."""
    for case, groups in (("some, two norms", 2), ("some, one norm", 1)):
        source, out = checkpoint("falcon", name=case, **ARCHITECTURES[case]), tmp_path / f"{groups} heads"
        damage(source, _equal_kv_heads)
        ok(convert("gqa", source, out, "--groups", groups))
        torch.testing.assert_close(logits(out), logits(source), rtol=1e-4, atol=1e-4)


def _equal_kv_heads(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            rows = tensor.unflatten(0, (4, 4, 8))  # 4 KV heads: Q, Q, K, V
            rows[:, 2:] = rows[:1, 2:]


def test_what_the_class_caches_beyond_its_heads_is_said() -> None:
    for changes in ARCHITECTURES.values():
        config = tiny_config("falcon", **changes)
        expected = {"KV heads that transformers caches": 8} if config.new_decoder_architecture else {}
        assert family_of("falcon").of(config).describe()["also"] == expected
