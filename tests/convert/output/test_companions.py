"""What stands beside the weights: companions byte for byte, a config, no more."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
from written import Convert, Find, Make, edit, ok, read

from convert.output.companions import copy_companions, write_config


@pytest.mark.parametrize("code", [False, True])
def test_companions_are_copied_byte_for_byte_and_the_rest_is_not(code: bool, checkpoint: Make, tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "out"
    out.mkdir()
    copied = ["generation_config.json", "chat_template.jinja", "LICENSE", "tokenizer.json", "tokenizer_config.json"]
    (source / copied[0]).write_text('{"do_sample": false, "temperature": 0.6}')  # transformers refuses to save this
    for name in (*copied[1:3], "README.md", "modeling_evil.py", "optimizer.pt"):
        (source / name).write_text(name)
    copied += ["modeling_evil.py"] if code else []
    copy_companions(out, source, code)
    assert filecmp.cmpfiles(source, out, copied, shallow=False) == (copied, [], [])
    assert {path.name for path in out.iterdir()} == {*copied}


def test_a_result_has_what_a_conversion_writes(finished: Find) -> None:
    made = finished("heads")
    assert {path.name for path in made.path.iterdir()} == {
        "config.json", "conversion.json", "generation_config.json", "model.safetensors", "README.md", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_a_dtype_replaces_the_old_name_of_the_key(tmp_path: Path) -> None:
    write_config(tmp_path, {"torch_dtype": "float32", "a": [1]}, "bfloat16")
    assert read(tmp_path / "config.json") == {"a": [1], "dtype": "bfloat16"}


def test_the_config_changes_in_two_keys_only(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = edit(checkpoint("qwen2"), unknown_to_transformers=[1, 2])
    raw = read(source / "config.json")
    ok(convert("mqa", source, tmp_path / "out"))
    assert read(tmp_path / "out" / "config.json") == raw | {"num_key_value_heads": 1, "head_dim": 8}
