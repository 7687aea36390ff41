"""GGUF files as sources: they say what they were made from says, and what transformers would leave out is refused."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import NAMES, model_of, write
from tiny import save_tokenizer
from written import Convert, left_nothing, ok, refused

from eval.inputs.gguf import unpacked_file as unpacked
from eval.inputs.source import Source


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvfold" / "unpacked"


def said(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", NAMES.values())
def test_a_file_says_what_its_model_says(model_type: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = model_of(model_type, tie_word_embeddings=tied)
    found = unpacked(write(tmp_path / "model.gguf", model))
    assert found.note == "the source is a GGUF file"
    loaded = AutoModelForCausalLM.from_pretrained(found.directory)
    config = loaded.config
    assert (config.model_type, config.bos_token_id, config.eos_token_id) == (model_type, 5, 7)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert (loaded.dtype, hasattr(config, "quantization_config")) == (torch.float32, False)
    torch.testing.assert_close(said(loaded), said(model), rtol=1e-4, atol=1e-4)
    # Of the characters from "!", "!!" is the last token, and the only one that is merged.
    assert AutoTokenizer.from_pretrained(found.directory)("!!#", add_special_tokens=False)["input_ids"] == [299, 2]


@pytest.mark.parametrize(
    ("kinds", "dtype"), [(["Q8_0"], "bfloat16"), (["F16"], "float16"), (["BF16"], "bfloat16"), (["Q8_0", "F16"], "bfloat16")]
)
def test_weights_become_what_the_plan_says(kinds: list[str], dtype: str, tmp_path: Path) -> None:
    """One quantised tensor is enough to say so, even where most bytes are plain floats."""
    from transformers import AutoModelForCausalLM

    model = model_of("llama")
    small = {"lm_head.weight": kinds[1]} if len(kinds) > 1 else {}
    found = unpacked(write(tmp_path / "model.gguf", model, kinds[0], others=small))
    loaded = AutoModelForCausalLM.from_pretrained(found.directory)
    assert str(loaded.dtype) == f"torch.{dtype}"
    assert ("Q8_0 weights were dequantised to bfloat16" in found.note) == ("Q8_0" in kinds)
    expected = said(model)
    assert float((said(loaded.float()) - expected).norm() / expected.norm()) < 0.05


def test_rules_of_splitting_that_are_not_read_are_named(tmp_path: Path) -> None:
    for pre, named in (("smollm", True), ("qwen2", False)):
        found = unpacked(write(tmp_path / f"{pre}.gguf", model_of("llama"), pre=pre))
        assert ("its tokenizer splits text by the rules 'smollm'" in found.note) == named


def test_nothing_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file of the same name in the working directory nor a tokenizer beside the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "here").mkdir()
    write(tmp_path / "here" / "model.gguf", model_of("llama", seed=1))
    model, path = model_of("llama"), tmp_path / "there" / "model.gguf"
    path.parent.mkdir()
    save_tokenizer(path.parent)
    write(path, model)
    monkeypatch.chdir(tmp_path / "here")
    found = unpacked(path)
    torch.testing.assert_close(said(AutoModelForCausalLM.from_pretrained(found.directory)), said(model), rtol=1e-4, atol=1e-4)
    assert len(AutoTokenizer.from_pretrained(found.directory)) == 300


def test_a_file_is_converted_and_evaluated(convert: Convert, cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "small.gguf"
    source.symlink_to(write(tmp_path / "blob", model_of("llama"), "Q8_0"))
    done = ok(convert("gqa", source, tmp_path / "out", "--groups", 1))
    assert "Q8_0 weights were dequantised to bfloat16" in done.stdout
    assert f"{source} is unpacked into {cache}" in done.stderr
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["recipe"]["gqa"]["model"] == str(source)  # also if it is a link, whose target may have another name
    assert "dequantised to bfloat16" in (tmp_path / "out" / "README.md").read_text()
    again = ok(convert("run", tmp_path / "out", tmp_path / "again"))
    assert "unpacked" not in again.stderr
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    (tmp_path / "text.txt").write_text("".join(map(chr, range(40, 120))) * 9)
    report = ok(convert("eval", source, tmp_path / "out", "--text", tmp_path / "text.txt", "--context", 32)).stdout
    assert "small" in report


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", model_of("llama"))
    first = unpacked(path)
    assert unpacked(path) == first
    write(path, model_of("qwen3"))
    assert unpacked(path) != first
    assert Source.parse(str(path)).model_type == "qwen3"


@pytest.mark.parametrize(
    ("keys", "more", "message"),
    [
        ({"rope.scaling.type": "yarn"}, {}, "its key llama.rope.scaling.type is yarn"),
        ({"attention.sliding_window": 7}, {}, "its key llama.attention.sliding_window is 7"),
        ({"attention.key_length": 16}, {}, "its key llama.attention.key_length is 16"),
        ({"split.count": 2}, {}, "its key llama.split.count is 2"),
        ({}, {"rope_freqs.weight": torch.ones(16)}, "it has a tensor rope_freqs.weight"),
        ({}, {"model.layers.0.self_attn.q_proj.bias": torch.ones(128)}, "1 of its tensors have no place in the model"),
    ],
)
def test_what_transformers_would_leave_out_is_refused(
    keys: dict[str, Any], more: dict[str, Any], message: str, convert: Convert, cache: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "model.gguf", model_of("llama"), keys=keys, more=more)
    left_nothing(convert("mqa", source, tmp_path / "out"), 2, message, tmp_path / "out")
    assert not [path for path in cache.glob("*") if path.is_dir()], "nothing is kept of it"


def test_a_missing_tensor_is_refused(convert: Convert, tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", model_of("llama"), without="model.layers.1.mlp.up_proj.weight")
    left_nothing(convert("mqa", source, tmp_path / "out"), 2, "1 tensors are missing", tmp_path / "out")


def test_other_files_are_refused(convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(convert("inspect", tmp_path / "other.gguf"), 2, "kvfold reads GGUF files of llama, qwen2, qwen3")
    (tmp_path / "text.gguf").write_text("no model" * 99)
    refused(convert("inspect", tmp_path / "text.gguf"), 2, "is not a GGUF file, or is incomplete")
    refused(convert("inspect", tmp_path / "missing.gguf"), 2, "no model directory")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(convert("inspect", tmp_path / "other.gguf"), 2, "pip install 'kvfold[gguf]'")


@pytest.mark.parametrize(
    "damage", ["flipped", "other weights", "cut", "gone", "missing entry", "no entry", "other entry", "unfinished"]
)
def test_a_damaged_entry_is_made_again(damage: str, cache: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", model_of("llama"))
    first = unpacked(path)
    entry, weights = first.directory.parent / "entry.json", first.directory / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "flipped":
        entry.write_bytes(entry.read_bytes().replace(b"GGUF", b"GGUE"))
    elif damage == "other weights":
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "cut":
        weights.write_bytes(whole[:-1])
    elif damage == "gone":
        weights.unlink()
    elif damage == "missing entry":
        entry.unlink()
    elif damage == "no entry":
        entry.write_text("[1")
    elif damage == "other entry":
        entry.write_text(json.dumps({"note": "a"}))
    else:
        (cache / "unfinished").mkdir()
        (cache / "unfinished" / "part").write_text("half")
        path.touch()
    again = unpacked(path)
    assert again.note == first.note
    assert (again.directory / "model.safetensors").read_bytes() == whole
    assert len([place for place in cache.iterdir() if place.is_dir()]) == 1, "of the same file, only one is kept"


def test_the_cache_is_listed_and_cleared(convert: Convert, cache: Path, tmp_path: Path) -> None:
    assert "nothing is unpacked" in ok(convert("cache", "list")).stdout
    assert "0.00 GB freed" in ok(convert("cache", "clear")).stdout
    path = write(tmp_path / "model.gguf", model_of("llama"))
    found = unpacked(path)
    listed = json.loads(ok(convert("cache", "list", "--json")).stdout)
    assert [(one["file"], one["bytes"]) for one in listed] == [(str(path), found.nbytes)]
    assert found.nbytes > (found.directory / "model.safetensors").stat().st_size
    assert json.loads(ok(convert("cache", "clear", "--json")).stdout)["freed_bytes"] >= found.nbytes
    assert not [place for place in cache.iterdir() if place.is_dir()]


_COUNTS = struct.Struct("<4sIQQ")  # magic, version, tensors, keys


def header(tensors: int = 0, keys: int = 1, key: bytes = b"general.architecture", value: bytes = b"", kind: int = 8) -> bytes:
    return _COUNTS.pack(b"GGUF", 3, tensors, keys) + struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(keys=2**40, value=text(b"llama")), "has 1099511627776 keys"),
        (header(tensors=2**31, value=text(b"llama")), "has 2147483648 tensors"),
        (header(value=struct.pack("<IQ", 0, 2**40), kind=9), "lists have more than 2097152 values"),
        (header(value=struct.pack("<IQ", 9, 2**20) + b"\0" * 99, kind=9), "has a list of lists"),
        (header(value=struct.pack("<Q", 2**63), kind=8), "its header ends too soon"),
        (header(value=struct.pack("<IQ", 4, 2**20), kind=9), "its header ends too soon"),
        (header(value=b"\0" * 8, kind=77), "has a value of type 77"),
        (header(value=text(b"ll\xffma")), "codec can't decode"),
        (header(key=b"\xff" * 9, value=text(b"llama")), "codec can't decode"),
        (header(value=text(b"llama"))[:-1], "its header ends too soon"),
        (_COUNTS.pack(b"GGUF", 3 << 24, 0, 0), "another byte order"),
        (b"", "does not begin with GGUF"),
    ],
)
def test_a_header_that_no_model_has_is_refused_at_once(data: bytes, message: str, convert: Convert, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    began = time.monotonic()
    refused(convert("inspect", tmp_path / "model.gguf"), 2, message)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length"])
def test_sizes_that_are_not_those_of_the_tensors_are_refused_at_once(key: str, convert: Convert, tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", model_of("llama"), keys={key: 2**31})
    refused(convert("inspect", source), 2, f"is damaged: its key llama.{key} is 2147483648, and its tensors say")


def test_a_disk_that_fills_up_while_it_unpacks_is_named(
    convert: Convert, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    source = write(tmp_path / "model.gguf", model_of("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        refused(convert("inspect", source), 1, "No space left on device")
    assert not [place for place in cache.iterdir() if place.is_dir()]
    ok(convert("inspect", source))


def test_a_full_disk_is_named(convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "model.gguf", model_of("llama"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(convert("inspect", source), 1, "XDG_CACHE_HOME may name a directory on another one")
