"""A result splits text as its source does, although transformers also looks at the model type for a tokenizer's class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from latents import SMALL
from written import Convert, Make, left_nothing, ok

SAID = "Once upon a  time, there was\nthe end. "


def ids(path: Path) -> list[int]:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(path)(SAID).input_ids
    assert isinstance(found, list)
    return found


def class_of(path: Path) -> str:
    return str(json.loads((path / "tokenizer_config.json").read_text())["tokenizer_class"])


def test_a_class_that_only_the_source_gets_is_named(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """transformers loads any tokenizer of a qwen2 as a Qwen2Tokenizer, which splits words its own way."""
    source, plain = checkpoint("qwen2"), checkpoint("llama", name="plain")
    assert ids(source) != ids(plain), "the same files"
    ok(convert("mla", source, tmp_path / "out", *SMALL))
    ok(convert("gqa", source, tmp_path / "grouped", "--groups", 2))
    assert ids(tmp_path / "out") == ids(tmp_path / "grouped") == ids(source)
    assert (class_of(tmp_path / "out"), class_of(tmp_path / "grouped")) == ("Qwen2Tokenizer", class_of(source))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kept", ["tokenizer.json", "vocab.json"])
def test_special_tokens_of_a_class_stay(kept: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """GPT-2's tokenizer has an end of text that no file names; it may also have no tokenizer.json."""
    from transformers import AutoTokenizer, GPT2Tokenizer

    source = checkpoint("gpt2")
    for file in source.glob("tokenizer*"):
        file.unlink()
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


def test_what_is_loaded_alike_is_copied_bit_for_bit(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("llama")
    ok(convert("mla", source, tmp_path / "out", *SMALL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert ids(tmp_path / "out") == ids(source)


def test_a_checkpoint_without_a_tokenizer_needs_none(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("qwen2")
    for file in source.glob("tokenizer*"):
        file.unlink()
    ok(convert("mla", source, tmp_path / "out", *SMALL))
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_a_tokenizer_that_no_name_makes_the_same_is_refused(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convert.output import tokenizer

    source = checkpoint("qwen2")
    monkeypatch.setattr(tokenizer, "_same", lambda one, other: False)
    message = "a qwen2, as Qwen2Tokenizer; the result is a deepseek_v3, and with the same files transformers does not load"
    left_nothing(convert("mla", source, tmp_path / "out", *SMALL), 1, message, tmp_path / "out")
