"""What stands beside the weights: companions byte for byte, a config, no more."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import torch
from written import Convert, Make, ok, weights


def test_companions_are_copied_byte_for_byte_and_the_rest_is_not(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.6}'
    )  # transformers refuses to save this
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("ours")
    (source / "README.md").write_text("---\nlicense: mit\n---\n# Source\n")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "optimizer.pt").write_text("large")
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    copied = ["generation_config.json", "chat_template.jinja", "LICENSE", "tokenizer.json", "tokenizer_config.json"]
    assert filecmp.cmpfiles(source, tmp_path / "out", copied, shallow=False) == (copied, [], [])
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {*copied, "config.json", "model.safetensors", "README.md", "conversion.json"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card
    assert "was not measured" in card


def test_a_dtype_is_stored_and_written_into_the_config(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--dtype", "bfloat16"))
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["kv_bytes_per_token"]["after"] == 3 * 2 * 2 * 8 * 2


def test_a_dtype_replaces_the_old_name_of_the_key(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    raw = json.loads((source / "config.json").read_text()) | {"torch_dtype": "float32"}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--dtype", "bfloat16"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config


def test_the_config_changes_in_two_keys_only(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("qwen2")
    raw = json.loads((source / "config.json").read_text()) | {"unknown_to_transformers": [1, 2]}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("mqa", source, tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw | {"num_key_value_heads": 1, "head_dim": 8}
