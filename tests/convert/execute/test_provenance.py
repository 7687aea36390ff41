"""conversion.json: every tensor is accounted for, and the conversion can be repeated from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL, WAYS, method_options
from written import ok, same_but_for_the_run, weights

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]


def test_every_tensor_is_accounted_for_once(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("olmo2")
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean"))
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    converted, copied = provenance["tensors"]["converted"], provenance["tensors"]["copied"]
    assert sorted(converted + copied) == sorted(weights(source))
    assert {name.split("self_attn.")[1] for name in converted} == {"k_proj.weight", "v_proj.weight", "k_norm.weight"}
    assert "inexact" in provenance["notes"][0]
    before, after = weights(source), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in copied)


def test_a_cast_is_not_called_a_copy(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    result = ok(convert("gqa", source, tmp_path / "out", "--groups", 4, "--dtype", "bfloat16"))
    assert "every tensor is cast to bfloat16" in result.stdout
    tensors = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]
    assert sorted(tensors["cast"]) == sorted(weights(source))
    assert tensors["converted"] == tensors["copied"] == []


def test_heads_that_had_tensors_of_their_own_are_accounted_for(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("stablelm", qk_layernorm=True)
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    ok(convert("gqa", source, tmp_path / "same", "--groups", 4, "--force"))
    tensors = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]
    assert sorted([*tensors["converted"], *tensors["copied"], *tensors["dropped"]]) == sorted(weights(source))
    assert len(tensors["dropped"]) == 3 * 2
    assert not any("q_layernorm" in name for name in tensors["converted"])
    same = json.loads((tmp_path / "same" / "conversion.json").read_text())
    assert same["method"] is None
    assert same["tensors"]["converted"] == []


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_of_a_latent_is_accounted_for_once(tied: bool, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(tie_word_embeddings=tied)
    ok(convert("mla", source, tmp_path / "out", *SMALL))
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]
    before, after = weights(source), weights(tmp_path / "out")
    assert sorted([*provenance["converted"], *provenance["copied"]]) == sorted(after)
    assert provenance["cast"] == []
    assert set(provenance["dropped"]) == set(before) - set(after)
    assert {name.split("self_attn.")[1] for name in provenance["dropped"]} == {"k_proj.weight", "v_proj.weight"}
    assert set(provenance["dropped"].values()) == {"factored into kv_a_proj_with_mqa and kv_b_proj"}
    assert {name.split("self_attn.")[1] for name in provenance["converted"]} >= {"q_proj.weight", "kv_b_proj.weight"}
    assert all(torch.equal(before[name], after[name]) for name in provenance["copied"])
    assert {name for name in before if "self_attn" not in name} == set(provenance["copied"]) - {
        name for name in provenance["copied"] if "self_attn" in name
    }


@pytest.mark.parametrize("method", WAYS)
def test_a_conversion_is_repeated_from_its_provenance(
    method: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    options = ["--max-shard-size", "30KB", *method_options(method, words)]
    if method == "pca":
        options += ["--calibration-tokens", 1000, "--calibration-context", 50, "--freqfold", 4]
    ok(convert("mla", checkpoint(), tmp_path / "a", *SMALL, *options))
    ok(convert("run", tmp_path / "a", tmp_path / "b"))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")
    provenance = json.loads((tmp_path / "a" / "conversion.json").read_text())
    assert (provenance["calibration_hash"] is None) == (method in ("svd", "weighted"))
    if method == "pca":
        assert provenance["calibration"] == {
            "text": "text.txt",
            "texts": [{"text": "text.txt", "tokens": 1000, "hash": provenance["calibration_hash"]}],
            "tokens": 1000,
            "context": 50,
            "block_lengths": [50],
            "max_context": 50,
        }


def test_a_budget_becomes_a_size_that_is_repeated(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("mla", checkpoint(), tmp_path / "a", "--kv-budget", "37.5%"))
    ok(convert("run", tmp_path / "a", tmp_path / "b"))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")


def test_a_text_in_shorter_blocks_is_another_calibration(
    checkpoint: Make, convert: Convert, letters: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "a", "--groups", 2, "--text", letters, "--calibration-tokens", 256,
               "--calibration-context", 32))  # fmt: skip
    provenance = json.loads((tmp_path / "a" / "conversion.json").read_text())
    texts = [{"text": "text.txt", "tokens": 256, "hash": provenance["calibration_hash"]}]
    expected = {"text": "text.txt", "texts": texts, "tokens": 256, "context": 32, "block_lengths": [32], "max_context": 32}
    assert provenance["calibration"] == expected
    recipe = provenance["recipe"]["gqa"]
    assert (recipe["calibration_tokens"], recipe["calibration_context"], recipe["refit"]) == (256, 32, True)
    ok(convert("run", tmp_path / "a", tmp_path / "b"))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")


def test_a_longer_context_is_a_choice_of_its_own(checkpoint: Make, convert: Convert, letters: Path, tmp_path: Path) -> None:
    common = ("mla", checkpoint(head_dim=16), "--kv-lora-rank", 24, "--qk-rope-head-dim", 8, "--text", letters)
    common += ("--calibration-tokens", 512, "--calibration-context", 32)
    found = {}
    for context in (32, 128):
        ok(convert(*common[:2], tmp_path / str(context), *common[2:], "--max-context", context))
        found[context] = json.loads((tmp_path / str(context) / "conversion.json").read_text())
        assert found[context]["calibration"]["max_context"] == context
    assert len(found[32]["rotary_frequencies_tried"]) == 2
    assert "rotary_frequencies_tried" not in found[128], "short blocks cannot tell which is better in a long context"
    assert found[128]["rotary_frequencies"] != sorted(found[128]["rotary_frequencies"]), "atoms, in the order of the pursuit"
    plan = ok(convert(*common[:2], tmp_path / "c", *common[2:], "--max-context", 128, "--dry-run")).stdout
    assert "in blocks of 32 for contexts of 128" in plan
    ok(convert("run", tmp_path / "128", tmp_path / "b"))
    same_but_for_the_run(tmp_path / "128", tmp_path / "b")


def test_a_conversion_is_repeated_from_another_directory(
    checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint()
    monkeypatch.chdir(tmp_path)
    ok(convert("gqa", source.name, "out", "--groups", 2, *on[2:], "--text", letters.name))
    assert f"convert gqa {source.name} OUTPUT" in (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ok(convert("run", tmp_path / "out" / "conversion.json", "again"))
    again, first = (path / "model.safetensors" for path in (tmp_path / "elsewhere" / "again", tmp_path / "out"))
    assert again.read_bytes() == first.read_bytes()
