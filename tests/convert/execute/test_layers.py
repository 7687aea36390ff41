"""Weights are written in bounded shards, where there is room for them, and only if they are finite."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from latents import SMALL, method_options
from rows import rows
from safetensors.torch import load_file
from written import Convert, Find, Logits, Make, damage, left_nothing, ok, read, stop_at, weights

from convert.execute import layers as writer
from convert.methods import LATENT


def test_shards_are_bounded_indexed_and_complete(
    finished: Find, shelf: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    """Also of a source in several shards."""
    many, one = finished("latent in shards").path, tmp_path / "one"
    ok(convert("mla", shelf(shard="60KB"), one, *SMALL))
    files = sorted(many.glob("*.safetensors"))
    assert len(files) > 3
    index, found, expected = read(many / "model.safetensors.index.json"), weights(many), weights(one)
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["weight_map"].keys() == found.keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for file in files:
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 40_000 or len(tensors) == 1 or "self_attn" in next(iter(tensors))
    assert torch.equal(logits(many), logits(one))


BAD = [
    *(("weighted", name, float("nan")) for name in (
        "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight", "model.embed_tokens.weight",
    )),
    *((method, "model.layers.1.self_attn.k_proj.weight", float("inf")) for method in LATENT),
]  # fmt: skip


@pytest.mark.parametrize(("method", "name", "value"), rows(BAD, [row for row in BAD if row[0] == "weighted"]))
def test_weights_that_are_not_finite_are_named(
    method: str, name: str, value: float, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = damage(checkpoint(), lambda tensors: tensors[name].fill_(value))
    result = convert("mla", source, tmp_path / "out", *SMALL, *method_options(method, words))
    left_nothing(result, 1, f"tensor {name} holds NaN or infinite values", tmp_path / "out")


def test_a_device_without_memory_leaves_the_work_for_resume(
    shelf: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "gqa", shelf(), tmp_path / "out", "--groups", 2, "--max-shard-size", "20KB"
    with monkeypatch.context() as patch:
        stop_at(patch, writer, "_fill", 3, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        result = convert(*command)
    assert result.exit_code == 1
    assert "error: no memory left on cpu: CUDA out of memory. Tried to allocate 2.00 GiB." in result.stderr
    assert "--resume" in result.stderr
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial" / "checkpoint").glob("*.safetensors")}
    assert len(finished) == 2
    ok(convert(*command, "--resume"))
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == when for name, when in finished.items())


def test_too_little_space_is_seen_before_the_first_byte(
    shelf: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts the survey."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    ok(convert("mla", shelf(), tmp_path / "svd", *SMALL, "--method", "svd"))
    survey = convert("mla", shelf(), tmp_path / "pca", *SMALL, "--method", "pca", "--text", words)
    left_nothing(survey, 1, "no space", tmp_path / "pca")
