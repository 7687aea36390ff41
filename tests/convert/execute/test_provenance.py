"""conversion.json: a conversion is repeated from it, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from latents import SMALL, WAYS, method_options
from written import Convert, Find, Make, ok, read, same_but_for_the_run

BLOCKS = ["--calibration-tokens", 1000, "--calibration-context", 50, "--freqfold", 4]


@pytest.mark.parametrize("method", WAYS)
def test_a_conversion_is_repeated_from_its_provenance(
    method: str, shelf: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    options = [*method_options(method, words), *(BLOCKS if method == "pca" else [])]
    size = ["--kv-budget", "37.5%"] if method == "svd" else SMALL  # a budget is repeated by its size
    ok(convert("mla", shelf(), tmp_path / "a", *size, *options, "--max-shard-size", "30KB"))
    ok(convert("run", tmp_path / "a", tmp_path / "b"))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")
    provenance = read(tmp_path / "a" / "conversion.json")
    assert (provenance["calibration_hash"] is None) == (method in ("svd", "weighted"))
    if method == "pca":
        texts = [{"text": "text.txt", "tokens": 1000, "hash": provenance["calibration_hash"]}]
        blocks = {"tokens": 1000, "context": 50, "block_lengths": [50], "max_context": 50}
        assert provenance["calibration"] == {"text": "text.txt", "texts": texts} | blocks


def test_a_text_in_shorter_blocks_is_another_calibration(finished: Find, convert: Convert, tmp_path: Path) -> None:
    """Heads are repeated, too, with what measured them."""
    made = finished("heads with text")
    texts = [{"text": "text.txt", "tokens": 256, "hash": made.provenance["calibration_hash"]}]
    blocks = {"tokens": 256, "context": 32, "block_lengths": [32], "max_context": 32}
    assert made.provenance["calibration"] == {"text": "text.txt", "texts": texts} | blocks
    recipe = made.provenance["recipe"]["gqa"]
    assert (recipe["calibration_tokens"], recipe["calibration_context"], recipe["refit"]) == (256, 32, True)
    ok(convert("run", made.path, tmp_path / "again", "--evaluate", made.command[-1]))
    same_but_for_the_run(made.path, tmp_path / "again")


def test_a_longer_context_is_a_choice_of_its_own(shelf: Make, convert: Convert, letters: Path, tmp_path: Path) -> None:
    command = ("mla", shelf(head_dim=16), tmp_path / "out", "--kv-lora-rank", 24, "--qk-rope-head-dim", 8, "--text", letters)
    command += ("--calibration-tokens", 512, "--calibration-context", 32, "--max-context", 128)
    assert "in blocks of 32 for contexts of 128" in ok(convert(*command, "--dry-run")).stdout
    ok(convert(*command))
    found = read(tmp_path / "out" / "conversion.json")
    assert found["calibration"]["max_context"] == found["recipe"]["mla"]["max_context"] == 128
    assert "rotary_frequencies_tried" not in found, "short blocks cannot tell which is better in a long context"
    assert found["rotary_frequencies"] != sorted(found["rotary_frequencies"]), "atoms, in the order of the pursuit"


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
