"""A directory that is no checkpoint of transformers is named for what it is, with the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attention
from attention.errors import Refusal
from eval.inputs.layouts import found_among, names_in
from eval.inputs.source import Source


def laid(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    return path


FOUND = {
    ("adapter_config.json", "adapter_model.safetensors"): ("an adapter (adapter_config.json", "merge_and_unload()"),
    ("params.json", "consolidated.00.pth"): ("their maker's own layout (consolidated.00.pth)", "transformers' layout"),
    ("consolidated.safetensors", "tokenizer.json"): ("their maker's own layout (consolidated.safetensors)", "config.json and"),
    ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"): (
        "shards without an index (….index.json), which says what each of them holds (model-00001-of-00002.safetensors, m",
        "get the index from where they came from",
    ),
    ("pytorch_model-00001-of-00001.bin",): ("shards without an index (….index.json)", "get the index"),
    ("model.safetensors", "tokenizer.json"): ("weights alone (model.safetensors)", "get config.json"),
    ("pytorch_model.bin.index.json",): ("weights alone (pytorch_model.bin.index.json)", "get config.json"),
    ("model.fp16.safetensors",): ("weights under another name (model.fp16.safetensors)", "rename them to model.safetensors"),
    ("a.gguf", "b.gguf", "c.gguf", "d.gguf"): ("GGUF files (a.gguf, b.gguf, c.gguf, …)", "name one of them"),
    ("tf_model.h5",): ("weights of TensorFlow (tf_model.h5)", "as safetensors"),
    ("flax_model.msgpack",): ("weights of Flax", "as safetensors"),
    ("zero_to_fp32.py", "latest"): ("a state of DeepSpeed", "zero_to_fp32.py"),
    ("step-1/config.json", "step-2/config.json"): (
        "checkpoints one level deeper (step-1/config.json, st",
        "name one of them",
    ),
}


@pytest.mark.parametrize("names", FOUND, ids=lambda names: names[0])
def test_what_lies_there_is_named(names: tuple[str, ...], tmp_path: Path) -> None:
    what, step = FOUND[names]
    with pytest.raises(Refusal) as caught:
        _ = Source.parse(str(laid(tmp_path, *names))).raw
    assert str(caught.value).startswith(f"{tmp_path} has no config.json: it holds ")
    assert what in str(caught.value)
    assert step in str(caught.value.hint)


def test_what_is_not_known_is_not_named_and_an_adapter_with_its_base_model(tmp_path: Path) -> None:
    laid(tmp_path, "config.json", "notes.txt", "deep/er/config.json")
    assert found_among(names_in(tmp_path), tmp_path) is None
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "nobody/base"}))
    found = found_among(names_in(tmp_path), tmp_path)
    assert found is not None
    assert found[0] == "an adapter (adapter_config.json; its base model is nobody/base)"


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    """Where peft is installed, transformers would add it to the weights, and a conversion would not."""
    source = Source.parse(str(laid(tmp_path, "config.json", "adapter_config.json", "model.safetensors")))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Refusal, match=r"holds an adapter beside its model \(adapter_config\.json\)") as caught:
        _ = source.config
    assert caught.value.hint == "merge it, or, if the weights have it already, take adapter_config.json out"
    with pytest.raises(Refusal, match="an adapter beside its model"):
        attention.load(tmp_path)


def test_an_adapter_in_a_repository_of_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(*_: Any, allow_patterns: list[str], **__: Any) -> str:
        return str(tmp_path / ("config" if allow_patterns == ["config.json"] else "whole"))

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repository, revision: ["model.safetensors"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for directory in (laid(tmp_path / "config", "config.json"), laid(tmp_path / "whole", "config.json", "adapter_config.json")):
        (directory / "config.json").write_text('{"model_type": "llama"}')
    source = Source.parse("nobody/tiny")
    assert source.config.model_type == "llama"
    with pytest.raises(Refusal, match="nobody/tiny holds an adapter beside its model"):
        _ = source.files


def test_a_repository_of_the_hub_is_named_by_its_list_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    files = ["model-q4.gguf", "README.md"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "nothing"))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repository, revision: files)
    with pytest.raises(Refusal, match=r"nobody/tiny has no config\.json: it holds GGUF files \(model-q4\.gguf\)") as caught:
        _ = Source.parse("nobody/tiny").raw
    assert str(caught.value.hint) == "name one of them as MODEL: DIR/FILE.gguf"
