"""Weights are written in bounded shards, where there is room for them, and only if they are finite."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL, method_options
from rows import rows
from safetensors.torch import load_file
from written import damage, left_nothing, ok, same_but_for_the_run, weights

from convert.methods import LATENT

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]


def test_shards_are_bounded_indexed_and_complete(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint(shard="60KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    ok(convert("gqa", source, tmp_path / "many", "--groups", 2, "--max-shard-size", "40KB"))
    ok(convert("gqa", source, tmp_path / "one", "--groups", 2))
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    many, one = weights(tmp_path / "many"), weights(tmp_path / "one")
    assert index["weight_map"].keys() == many.keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in many.values())
    assert all(torch.equal(many[name], one[name]) for name in one)
    for file in files:
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 40_000 or len(tensors) == 1 or "self_attn" in next(iter(tensors))
    torch.testing.assert_close(logits(tmp_path / "many"), logits(tmp_path / "one"))


def test_shards_are_bounded_and_hold_the_same(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint(shard="60KB")
    ok(convert("mla", source, tmp_path / "many", *SMALL, "--max-shard-size", "40KB"))
    ok(convert("mla", source, tmp_path / "one", *SMALL))
    files = list((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    many, one = weights(tmp_path / "many"), weights(tmp_path / "one")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == many.keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in many.values())
    assert all(torch.equal(many[name], one[name]) for name in one)
    assert torch.equal(logits(tmp_path / "many"), logits(tmp_path / "one"))


@pytest.mark.parametrize("method", rows(LATENT, ["weighted"]))
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight",
     "model.norm.weight", "model.embed_tokens.weight"],
)  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(
    value: float, name: str, method: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = damage(checkpoint(), lambda tensors: tensors[name].fill_(value))
    result = convert("mla", source, tmp_path / "out", *SMALL, *method_options(method, words))
    left_nothing(result, 1, f"tensor {name} holds NaN or infinite values", tmp_path / "out")


def test_weights_that_overflow_when_they_are_written_are_named(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    source = damage(checkpoint(), lambda tensors: tensors[name].mul_(3.3e38 / tensors[name].abs().max()))
    result = convert("mla", source, tmp_path / "out", *SMALL)  # queries are scaled by √(16 / 8)
    left_nothing(result, 1, f"tensor {name}", tmp_path / "out")


# ---- no room ---------------------------------------------------------------------------------------------------------


def test_a_device_without_memory_leaves_the_work_for_resume(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convert.execute import weights as execute

    source, command = checkpoint(), ("--groups", 2, "--max-shard-size", "20KB")
    fill, left = execute._fill, [3]

    def fills_up(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return fill(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(execute, "_fill", fills_up)
        result = convert("gqa", source, tmp_path / "out", *command)
    assert result.exit_code == 1
    assert "error: no memory left on cpu: CUDA out of memory. Tried to allocate 2.00 GiB." in result.stderr
    assert "--resume" in result.stderr
    assert len(list((tmp_path / "out.partial" / "checkpoint").glob("*.safetensors"))) == 2
    ok(convert("gqa", source, tmp_path / "out", *command, "--resume"))


def test_a_full_disk_leaves_the_work_for_resume(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convert.execute import weights as execute

    source, command = checkpoint(), ("--groups", 2, "--max-shard-size", "20KB")
    written = []

    def fills_up(path: Path, *rest: Any) -> str:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        return write(path, *rest)

    write = execute.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_shard", fills_up)
        result = convert("gqa", source, tmp_path / "out", *command)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "--resume" in result.stderr
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        again = convert("gqa", source, tmp_path / "out", *command, "--resume")
    assert again.exit_code == 1
    assert "then use --resume" in again.stderr
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "out.partial" / "checkpoint").glob("*.safetensors")}
    assert len(finished) == 2
    ok(convert("gqa", source, tmp_path / "out", *command, "--resume"))
    assert all((tmp_path / "out" / path.name).stat().st_mtime_ns == when for path, when in finished.items())
    ok(convert("gqa", source, tmp_path / "whole", *command))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")


def test_too_little_space_is_seen_before_the_first_byte(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2)
    assert result.exit_code == 1
    assert "no space" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_full_disk_under_the_statistics_leaves_the_work_for_resume(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, options = checkpoint(), [*SMALL, "--method", "pca", "--text", words]
    with monkeypatch.context() as patch:
        patch.setattr("eval.inputs.sealed.write_whole", fails)
        result = convert("mla", source, tmp_path / "out", *options)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "--resume" in result.stderr
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))


def test_too_little_space_counts_the_survey(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**6})())
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "svd", *SMALL))
    result = convert("mla", source, tmp_path / "pca", *SMALL, "--method", "pca", "--text", words)
    left_nothing(result, 1, "no space", tmp_path / "pca")


def test_a_survey_under_way_outlives_a_disk_that_is_still_full(
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = checkpoint(), [*SMALL, "--method", "pca", "--text", words]

    def full(*rest: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("convert.execute.weights.write_shard", full)
        assert convert("mla", source, tmp_path / "out", *options).exit_code == 1
    found = {file.name for file in (tmp_path / "out.partial" / "steps").iterdir()}
    assert found
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        again = convert("mla", source, tmp_path / "out", *options, "--resume")
    assert again.exit_code == 1
    assert "then use --resume" in again.stderr
    assert {file.name for file in (tmp_path / "out.partial" / "steps").iterdir()} == found
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))
