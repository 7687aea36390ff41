"""Where a model lives and what its config says, before any weight is read."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from tiny import tiny_config
from transformers import dynamic_module_utils

from attention.errors import Failure, Refusal
from eval.inputs.source import Source


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Source]:
    """A directory with nothing but the config.json of a tiny Llama, some of its fields changed; None takes one away."""

    def make(**changes: Any) -> Source:
        values = json.loads(tiny_config("llama").to_json_string(use_diff=False)) | changes
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}), encoding="utf-8")
        return Source.parse(str(tmp_path))

    return make


def test_a_directory_is_taken_as_it_is_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "meta" / "llama@v1").mkdir(parents=True)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    source = Source.parse(str(tmp_path))
    assert (source.directory, source.repository, source.revision, source.commit) == (tmp_path, None, None, None)
    assert (source.reference, source.name, source.files) == (str(tmp_path), tmp_path.name, tmp_path)
    named = Source.parse("meta/llama@v1")
    assert (named.directory, named.repository, named.name) == (Path("meta/llama@v1"), None, "llama@v1")
    assert Source.parse(".").name == tmp_path.name
    assert Source.parse("~/meta").directory == tmp_path / "meta"


@pytest.mark.parametrize(
    ("reference", "repository", "revision", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf", None, "Llama-2-7b-hf"),
        ("meta-llama/Llama-2-7b-hf@main", "meta-llama/Llama-2-7b-hf", "main", "Llama-2-7b-hf@main"),
        ("nobody/model@refs/pr/3", "nobody/model", "refs/pr/3", None),
        ("gpt2", "gpt2", None, "gpt2"),
        ("gpt2@", "gpt2", None, None),
    ],
)
def test_anything_else_is_a_hub_id_with_an_optional_revision(
    reference: str, repository: str, revision: str | None, name: str | None
) -> None:
    source = Source.parse(reference)
    assert (source.directory, source.repository, source.revision) == (None, repository, revision)
    if name:
        assert source.name == name


@pytest.mark.parametrize(
    "reference", ["./model", "/no/such/model", "~/no/such/model", "~no-such-user/model", "a/b/c", "@main", "", "./model.bin"]
)
def test_a_path_to_no_directory_is_refused(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(Refusal) as caught:
        Source.parse(reference)
    assert str(caught.value) == f"no model directory {reference!r}"
    assert caught.value.hint == "give a directory with a config.json, a GGUF file or a Hub id"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"has no config\.json$"),
        (b"{", r"cannot read .*config\.json: Expecting property name"),
        (b'{"model_type": "\xff"}', r"cannot read .*config\.json: 'utf-8' codec"),
        (b"{}", r"config\.json names no model_type"),
        (b'["llama"]', r"config\.json names no model_type"),
        (b'{"model_type": 3}', r"config\.json names no model_type"),
        (b'{"model_type": "no_such_model"}', "transformers does not accept the config of .*: it has no model type"),
        (b'{"model_type": "llama", "hidden_size": 60}', "transformers does not accept the config of"),
    ],
)
def test_a_broken_config_is_refused_with_its_path(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(Refusal, match=message):
        _ = Source.parse(str(tmp_path)).config


def test_code_beside_the_weights_is_refused_unless_agreed_to(configured: Callable[..., Source]) -> None:
    source = configured(model_type="tiny_of_its_own", auto_map={"AutoConfig": "own.TinyConfig"})
    with pytest.raises(Refusal, match=r"wants to run code of its own \(auto_map in config\.json\)") as caught:
        _ = source.config
    assert caught.value.hint == "read that code, then give --trust-remote-code"


def test_a_former_model_type_is_refused_by_name(configured: Callable[..., Source]) -> None:
    source = configured(model_type="qwen", auto_map={"AutoConfig": "own.QwenConfig"})
    with pytest.raises(Refusal, match=r"transformers has no class for model type 'qwen' of ") as caught:
        _ = source.raw
    assert caught.value.hint == "get a later revision, or a copy of it that was converted to a class of transformers"
    assert Source.parse(source.reference, trust_remote_code=True).needs_code
    untold = configured(model_type="qwen")
    with pytest.raises(Refusal, match="no class for model type"):
        _ = Source.parse(untold.reference, trust_remote_code=True).raw


def test_transformers_own_class_takes_the_place_of_code(configured: Callable[..., Source]) -> None:
    source = configured(auto_map={"AutoConfig": "no_such_file.TinyConfig"})
    assert type(source.config).__name__ == "LlamaConfig"
    assert "auto_map" not in source.raw, "nothing that is made from it names code that nobody read"
    assert source.notes == ("its own code (auto_map in config.json) is not used: transformers' class for llama reads it",)
    trusting = Source.parse(source.reference, trust_remote_code=True)
    assert (trusting.notes, "auto_map" in trusting.raw) == ((), True)


CODE = """
from transformers import LlamaConfig

class TinyConfig(LlamaConfig):
    model_type = "tiny_of_its_own"
"""


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where transformers copies a checkpoint's own code to and imports it from; both are undone."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


@pytest.mark.usefixtures("modules_cache")
@pytest.mark.parametrize("place", ["directory", "hub"])
def test_a_config_of_its_own_class_is_read_when_agreed_to(
    place: str, configured: Callable[..., Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Path(configured(model_type="tiny_of_its_own", auto_map={"AutoConfig": "own.TinyConfig"}).reference)
    (published / "own.py").write_text(CODE, encoding="utf-8")
    (published / "model.safetensors").write_bytes(b"large")

    def download(repository: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        for pattern in allow_patterns:
            for file in published.glob(pattern):
                (tmp_path / "snapshot").mkdir(exist_ok=True)
                shutil.copy(file, tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    reference = str(published) if place == "directory" else "nobody/tiny"
    config = Source.parse(reference, trust_remote_code=True).config
    assert type(config).__name__ == "TinyConfig"
    assert config.hidden_size == 64
    assert not (tmp_path / "snapshot" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "torch.bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": None}, "float32"),
    ],
)
def test_the_dtype_is_what_the_config_says_else_the_weights(
    changes: dict[str, Any], expected: str, configured: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = configured(**changes)
    assert source.dtype == expected
    if expected == "float32":
        for dtype in (torch.bfloat16, torch.float16):
            save_file({"ids": torch.arange(3), "x": torch.ones(2, dtype=dtype)}, source.files / "model.safetensors")
            assert Source.parse(source.reference).dtype == str(dtype).removeprefix("torch.")
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: source.reference)
        monkeypatch.delattr(Source, "files")  # which downloads weights
        assert Source.parse("nobody/tiny").dtype == "float16"
        found = SimpleNamespace(files_metadata={"": SimpleNamespace(tensors={"x": SimpleNamespace(dtype="BF16")})})
        monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *args, **kwargs: found)
        assert Source.parse("nobody/tiny").dtype == "bfloat16", "of the headers, without a download"
        (source.files / "model.safetensors").write_bytes(b"\xff" * 64)
        assert Source.parse(source.reference).dtype == "float32", "whoever reads it says that it is damaged"


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"model_type": "llama", "max_position_embeddings": 77}, 77),
        ({"model_type": "mpt", "n_heads": 4, "d_model": 64, "max_seq_len": 77}, 77),
        ({"model_type": "bloom", "n_head": 4, "hidden_size": 64}, None),
        ({"model_type": "xlnet"}, None),  # which has -1
    ],
)
def test_the_position_limit_is_what_the_config_says(config: dict[str, Any], limit: int | None, tmp_path: Path) -> None:
    """Keys with older names raise no warning."""
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}} if config["model_type"] == "llama" else {}
    (tmp_path / "config.json").write_text(json.dumps(config | rope), encoding="utf-8")
    assert Source.parse(str(tmp_path)).max_positions == limit


def test_a_hub_that_cannot_be_reached_fails_with_a_hint() -> None:
    source = Source.parse("nobody-at-all/no-such-model")
    for read in (lambda: source.raw, lambda: source.config, lambda: source.files):
        with pytest.raises(Failure, match="cannot get 'nobody-at-all/no-such-model' from the Hub: ") as caught:
            read()
        assert "no directory of that name exists either; check the spelling, the network" in str(caught.value.hint)


OTHERS = ["consolidated.safetensors", "model.fp16.safetensors", "onnx/model.safetensors"]


@pytest.mark.parametrize(
    ("files", "pickles"),
    [(["model.safetensors"], False), (["pytorch_model.bin"], True), (["pytorch_model.bin", *OTHERS], True)],
)
def test_a_hub_repository_is_read_at_the_commit_that_was_downloaded(
    files: list[str], pickles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pickled weights are downloaded only where there are no others."""
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(repository: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        (tmp_path / "abc123").mkdir(exist_ok=True)
        (tmp_path / "abc123" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        return str(tmp_path / "abc123")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repository, revision: ["config.json", *files])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = Source.parse("nobody/model@v2")
    assert (source.model_type, source.commit, source.files) == ("llama", "abc123", tmp_path / "abc123")
    assert asked[0] == ("nobody/model", "v2", ["config.json"])
    assert asked[1][:2] == ("nobody/model", "abc123"), "the weights must be of the commit whose config was read"
    assert "model*.safetensors" in asked[1][2]
    assert ("pytorch_model*.bin" in asked[1][2]) == pickles


def test_of_a_hub_repository_only_what_a_conversion_needs_is_downloaded() -> None:
    from eval.inputs import source

    wanted = [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "tekken.json", "merges.txt",
        "chat_template.jinja", "additional_chat_templates/tool.jinja", "LICENSE", "README.md",
    ]  # fmt: skip
    unwanted = [
        "consolidated.safetensors", "model.fp16.safetensors", "onnx/model.onnx", "original/params.json", "model-q4.gguf",
        "text_encoder/model.safetensors", "pytorch_model.bin", ".gitattributes", "adapter/adapter_config.json",
        "flax_model.msgpack",
    ]  # fmt: skip
    patterns = {"allow_patterns": source._WANTED, "ignore_patterns": source._UNWANTED}
    assert list(filter_repo_objects(wanted + unwanted, **patterns)) == wanted
