"""What stands beside the weights: companions byte for byte, a config, and a tokenizer that splits text as the source's does."""

from __future__ import annotations

import filecmp
import json
import re
from pathlib import Path

import pytest
from latents import SMALL
from transformers import AutoTokenizer, GPT2Tokenizer
from written import Convert, Find, Make, edit, ok, read, without_tokenizer

from attention.errors import Failure
from convert.output import companions
from convert.output.companions import copy_companions, tokenizer_class, write_config
from eval.inputs.source import Source


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


SAID = "Once upon a  time, there was\nthe end. "


def ids(path: Path) -> list[int]:
    return AutoTokenizer.from_pretrained(path)(SAID).input_ids


def class_of(path: Path) -> str:
    return str(read(path / "tokenizer_config.json")["tokenizer_class"])


def test_a_class_that_only_the_source_gets_is_named(shelf: Make, finished: Find, convert: Convert, tmp_path: Path) -> None:
    """transformers loads any tokenizer of a qwen2 as a Qwen2Tokenizer, which splits words its own way."""
    source, plain, out = shelf("qwen2"), finished("latent in shards"), tmp_path / "out"
    assert ids(source) != ids(plain.source), "the same files"
    ok(convert("mla", source, out, *SMALL))
    assert (ids(out), class_of(out)) == (ids(source), "Qwen2Tokenizer")
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert tokenizer_class(Source.parse(str(source)), read(source / "config.json")) is None
    for name in ("tokenizer.json", "tokenizer_config.json"):  # what is loaded alike
        assert (plain.path / name).read_bytes() == (plain.source / name).read_bytes()
    assert ids(plain.path) == ids(plain.source)


@pytest.mark.parametrize("kept", ["tokenizer.json", "vocab.json"])
def test_special_tokens_of_a_class_stay(kept: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """GPT-2's tokenizer has an end of text that no file names; it may also have no tokenizer.json."""
    source = without_tokenizer(checkpoint("gpt2"))
    vocabulary = {chr(code): code - 33 for code in range(33, 120)} | {"Ġ": 90, "<|endoftext|>": 91}
    if kept == "vocab.json":
        (source / "vocab.json").write_text(json.dumps(vocabulary))
        (source / "merges.txt").write_text("#version: 0.2\n")
    else:
        GPT2Tokenizer(vocab=vocabulary, merges=[]).save_pretrained(source)
        (source / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    before, after = (AutoTokenizer.from_pretrained(path, trust_remote_code=False) for path in (source, tmp_path / "out"))
    assert before.eos_token == "<|endoftext|>"
    assert (after.eos_token, after("a b").input_ids) == (before.eos_token, before("a b").input_ids)
    assert class_of(tmp_path / "out") == "GPT2Tokenizer"


def test_a_checkpoint_without_a_tokenizer_needs_none(checkpoint: Make, finished: Find) -> None:
    source = without_tokenizer(checkpoint("qwen2"))
    assert tokenizer_class(Source.parse(str(source)), finished("latent in shards").config) is None


def test_a_tokenizer_that_no_name_makes_the_same_is_refused(
    shelf: Make, finished: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "_same", lambda one, other: False)
    message = "a qwen2, as Qwen2Tokenizer; the result is a deepseek_v3, and with the same files transformers does not load"
    with pytest.raises(Failure, match=re.escape(message)):
        tokenizer_class(Source.parse(str(shelf("qwen2"))), finished("latent in shards").config)
