"""GGUF files as sources: they say what their models say, and what transformers would leave out is refused."""

import gc
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import ARCHITECTURES, model_of, write
from safetensors import SafetensorError
from tiny import save_tokenizer
from transformers import PreTrainedModel
from written import Convert, ok, refused

from attention.errors import Failure, Refusal
from eval.inputs.loading import load
from eval.inputs.source import Source


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    where = tmp_path / "temporary"
    where.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(where))
    return where


def said(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None]).logits


def said_by(path: Path) -> torch.Tensor:
    with load(Source.parse(str(path)), "float32", "cpu") as model:
        return said(model)


# What transformers makes of a file is its own; one of each kind of config and of tensors is read in every run.
OFTEN = ("llama", "falcon", "gemma2", "qwen3_moe")


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_a_file_says_what_its_model_says(model_type: str, tmp_path: Path) -> None:
    model = model_of(model_type, tie_word_embeddings=True) if model_type == "llama" else model_of(model_type)
    source = Source.parse(str(write(tmp_path / "model.gguf", model)))
    (note,) = source.notes
    assert note.startswith("the source is a GGUF file; its tokenizer is as transformers reads it")
    config = source.config
    assert (config.model_type, config.bos_token_id, config.eos_token_id, source.dtype) == (model_type, 5, 7, "float32")
    with load(source, "float32", "cpu") as loaded:
        torch.testing.assert_close(said(loaded), said(model), rtol=1e-4, atol=1e-4)
    # Of the characters from "!", "!!" is the last token, and the only one that is merged.
    assert source.tokenizer()("!!#", add_special_tokens=False)["input_ids"] == [299, 2]


@pytest.mark.parametrize(("kinds", "dtype"), [(["F16"], "float16"), (["Q8_0", "F16"], "bfloat16")])
def test_weights_become_what_the_plan_says(kinds: list[str], dtype: str, tmp_path: Path) -> None:
    """One quantised tensor is enough to say so, even where most bytes are plain floats."""
    model = model_of("llama")
    small = {"lm_head.weight": kinds[1]} if len(kinds) > 1 else {}
    source = Source.parse(str(path := write(tmp_path / "model.gguf", model, kinds[0], others=small)))
    assert source.dtype == dtype
    assert {str(info.dtype) for info in source.reader().infos.values()} == {f"torch.{dtype}"}
    assert ("Q8_0 weights were dequantised to bfloat16" in source.notes[0]) == ("Q8_0" in kinds)
    expected = said(model)
    assert float((said_by(path) - expected).norm() / expected.norm()) < 0.05


def test_nothing_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file of the same name in the working directory nor a tokenizer beside the file."""
    (tmp_path / "here").mkdir()
    write(tmp_path / "here" / "model.gguf", model_of("llama", seed=1))
    model, path = model_of("llama"), tmp_path / "there" / "model.gguf"
    path.parent.mkdir()
    save_tokenizer(path.parent)
    write(path, model)
    monkeypatch.chdir(tmp_path / "here")
    torch.testing.assert_close(said_by(path), said(model), rtol=1e-4, atol=1e-4)
    assert len(Source.parse(str(path)).tokenizer()) == 300


def test_a_file_is_converted_and_evaluated_and_what_was_dequantised_is_removed(
    convert: Convert, temporary: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "small.gguf", tmp_path / "out"
    source.symlink_to(write(tmp_path / "blob", model_of("llama"), "Q8_0"))
    done = ok(convert("gqa", source, out, "--groups", 1))
    assert "Q8_0 weights were dequantised to bfloat16" in done.stdout
    assert f"{source} is dequantised into {temporary}" in done.stderr
    provenance = json.loads((out / "conversion.json").read_text())
    assert provenance["recipe"]["gqa"]["model"] == str(source)  # also if it is a link, whose target may have another name
    assert provenance["run"]["source_files"].keys() == {"small.gguf"}
    assert "dequantised to bfloat16" in (out / "README.md").read_text()
    assert "nothing to do" in ok(convert("gqa", source, out, "--groups", 1, "--resume")).stderr
    ok(convert("run", tmp_path / "out", tmp_path / "again"))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    (tmp_path / "text.txt").write_text("".join(map(chr, range(40, 120))) * 9)
    report = ok(convert("eval", source, out, "--text", tmp_path / "text.txt", "--context", 32))
    assert "small" in report.stdout
    assert f"{source} is dequantised into {temporary}" in report.stderr
    assert "was made from" not in report.stderr, "the file is known as what the result was made from"
    assert list(tmp_path.glob("out.*")) == list(temporary.iterdir()) == []


NORM, BIAS = torch.ones(16), torch.ones(128)
UNREAD: list[tuple[str, dict[str, Any], dict[str, torch.Tensor], str]] = [
    # As of Gemma 2 27B.
    ("gemma2", {"attention.key_length": 128, "attention.value_length": 128}, {}, "logits would be scaled for 256 dims"),
    ("llama", {"rope.scaling.type": "yarn"}, {}, "its key llama.rope.scaling.type is yarn"),
    ("llama", {"attention.sliding_window": 7}, {}, "its key llama.attention.sliding_window is 7"),
    ("llama", {"attention.key_length": 16}, {}, "its key llama.attention.key_length is 16, and 32 was read"),
    ("llama", {"attention.scale": 0.5}, {}, "its key llama.attention.scale is 0.5"),
    ("llama", {}, {"rope_freqs.weight": NORM}, "it has a tensor rope_freqs.weight"),
    ("llama", {}, {"model.layers.0.self_attn.q_proj.bias": BIAS}, "it has a tensor blk.0.attn_q.bias"),
    ("qwen3", {"attention.key_length": 32}, {}, "its key qwen3.attention.key_length is 32, and 128 was read"),
    ("starcoder2", {"rope.freq_base": 999999.0}, {}, "its key starcoder2.rope.freq_base is 999999.0, and 10000"),
    ("stablelm", {"rope.dimension_count": 16}, {}, "its key stablelm.rope.dimension_count is 16, and 8 was read"),
    ("phi3", {"attention.sliding_window": 2047}, {}, "its key phi3.attention.sliding_window is 2047, and None was read"),
    ("gemma3_text", {"rope.freq_base": None}, {}, "its key gemma3.rope.freq_base is not there, which means 10000.0, and "),
    ("gemma2", {"final_logit_softcapping": 20.0}, {}, "its key gemma2.final_logit_softcapping is 20.0, and 30.0 was read"),
    ("falcon", {"attention.layer_norm_epsilon": 1e-6}, {}, "falcon.attention.layer_norm_epsilon is 9.99"),
]


@pytest.mark.parametrize(("model_type", "keys", "more", "message"), UNREAD, ids=[message for *_, message in UNREAD])
def test_what_transformers_would_leave_out_is_refused(
    model_type: str, keys: dict[str, Any], more: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    source = Source.parse(str(write(tmp_path / "model.gguf", model_of(model_type), keys=keys, more=more)))
    with pytest.raises(Refusal, match="transformers does not read all of") as caught:
        _ = source.config
    assert message in str(caught.value)


def test_other_files_are_refused(convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "other.gguf", "mpt")
    writer.add_uint32("mpt.block_count", 1)
    writer.add_uint32("mpt.embedding_length", 8)
    for name in ("token_embd.weight", "blk.0.ffn_up.weight"):
        writer.add_tensor(name, torch.ones(8, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(convert("inspect", path), 2, "GGUF model with architecture mpt is not supported yet")
    (tmp_path / "text.gguf").write_text("no model" * 99)
    refused(convert("inspect", tmp_path / "text.gguf"), 2, "is not a GGUF file, or is incomplete")
    refused(convert("inspect", tmp_path / "missing.gguf"), 2, "no model directory")
    part = write(tmp_path / "part.gguf", model_of("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", _in_parts(gguf.GGUFWriter.write_header_to_file))
        write(part, model_of("llama"))
    refused(convert("inspect", part), 2, "is one of 2 parts")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(convert("inspect", path), 2, "pip install 'kvfold[gguf]'")


def _in_parts(write_header: Any) -> Any:
    def written(writer: Any, *rest: Any) -> None:
        writer.add_uint16("split.count", 2)
        write_header(writer, *rest)

    return written


_COUNTS = struct.Struct("<4sIQQ")  # magic, version, tensors, keys


def header(value: bytes, kind: int = 8, keys: int = 1) -> bytes:
    return _COUNTS.pack(b"GGUF", 3, 0, keys) + text(b"general.architecture") + struct.pack("<I", kind) + value


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(text(b"llama"), keys=2**40), "has 1099511627776 keys"),
        (header(struct.pack("<IQ", 0, 2**40), kind=9), "lists have more than 2097152 values"),
        (header(struct.pack("<IQ", 9, 2**20) + b"\0" * 99, kind=9), "has a list of lists"),
        (header(struct.pack("<Q", 2**63), kind=8), "its header ends too soon"),
        (header(struct.pack("<IQ", 4, 2**20), kind=9), "its header ends too soon"),
        (header(b"\0" * 8, kind=77), "has a value of type 77"),
        (header(text(b"ll\xffma")), "codec can't decode"),
        (_COUNTS.pack(b"GGUF", 3 << 24, 0, 0), "another byte order"),
        (b"", "does not begin with GGUF"),
    ],
)
def test_a_header_that_no_model_has_is_refused_at_once(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(Refusal, match=message):
        Source.parse(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_count": 2**31}, "is damaged: block_count is 2147483648; it must be from 1 to 2,048"),
        ({"block_count": 1}, "it has a tensor blk.1.attn_q.weight"),
        ({"block_count": 3}, "tensors are missing"),
        ({"embedding_length": 2**31}, "hidden_size is 2147483648; it must be"),
        ({"embedding_length": 64}, "transformers cannot read"),
    ],
    ids=str,
)
def test_sizes_that_are_not_those_of_the_tensors_are_refused(keys: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=message):
        _ = Source.parse(str(write(tmp_path / "model.gguf", model_of("llama"), keys=keys))).files


def test_a_disk_that_fills_up_is_named_and_left_empty(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(Failure, match="No space left on device"):
        _ = Source.parse(str(write(tmp_path / "model.gguf", model_of("llama")))).files
    gc.collect()
    assert list(temporary.iterdir()) == []
