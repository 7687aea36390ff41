"""What a conversion says of its result, what changes nothing, and that conversion.json repeats it, byte for byte."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from latents import SMALL, WAYS, method_options
from written import Convert, Find, Make, ok, read, same_but_for_the_run

import attention
from convert import inspect
from eval import evaluate

POSITIONS = {"calibrated_positions": 32, "source_positions": 128, "max_position_embeddings": 32}
SAID = "calibrated for 32 of its source's 128 positions: beyond, its text may become garbage"


def test_every_place_says_it(finished: Find, convert: Convert, letters: Path, warned: Callable[[], list[str]]) -> None:
    made, whole = finished("latent with text"), finished("heads")
    source, out = made.source, made.path
    assert SAID in made.stdout.splitlines()
    assert made.provenance.items() >= POSITIONS.items()
    assert made.config.items() >= POSITIONS.items()
    assert f"\n**This model is {SAID}.**\n" in made.card
    assert "calibrated for" not in whole.card + whole.stdout
    assert not POSITIONS.keys() & whole.provenance.keys()

    found = inspect(out)
    assert found.items() >= {"converted_from": str(source), "method": "weighted", "calibrated_positions": 32}.items()
    assert found["notes"] == [f"it is {SAID}"]
    assert "converted_from" not in inspect(source)

    attention.load(source)
    assert warned() == []
    attention.load(out)
    assert warned() == [f"{out} is {SAID}"]

    report = evaluate([source, out], text=letters, context=("100", 32), max_tokens=400, device="cpu")
    assert [model["calibration_context"] for model in report["models"]] == [None, 32]
    assert evaluate(out, text=letters, max_tokens=400)["protocol"]["context"] == 128, "as if the source were beside it"
    beyond = convert("eval", source, out, "--text", letters, "--context", 129)
    assert "a context of 129 tokens exceeds the 128 positions" in beyond.stderr


def test_a_healing_in_a_longer_context_is_for_more_positions(
    finished: Find, convert: Convert, letters: Path, tmp_path: Path
) -> None:
    heal = ["heal", finished("latent with text").path, tmp_path / "out", "--text", letters, "--tokens", 1024, "--lr", "1e-4"]
    ok(convert(*heal, "--context", 64))
    longer = POSITIONS | {"calibrated_positions": 64, "max_position_embeddings": 64}
    for name in ("config.json", "conversion.json"):
        assert read(tmp_path / "out" / name).items() >= longer.items()
    assert "calibrated for 64 of" in (tmp_path / "out" / "README.md").read_text()
    ok(convert(*heal, "--context", 128, "--overwrite"))
    assert read(tmp_path / "out" / "config.json")["max_position_embeddings"] == 128
    assert "calibrated_positions" not in read(tmp_path / "out" / "conversion.json")
    assert "calibrated for" not in (tmp_path / "out" / "README.md").read_text()


def test_a_number_that_is_none_is_refused(checkpoint: Make, convert: Convert) -> None:
    source = checkpoint("deepseek_v3", calibrated_positions=-1)
    assert "calibrated_positions is -1; it must be" in convert("inspect", source).stderr


def test_a_copy_is_refused(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, out = checkpoint(), tmp_path / "out"  # 4 KV heads
    refused = convert("gqa", source, out, "--groups", 4)
    assert refused.exit_code == 2
    assert refused.stderr.splitlines()[-2:] == [
        f"error: {source} has 4 KV heads already",
        "hint: choose 2 or 1, or copy it with --force",
    ]
    assert not out.exists()
    ok(convert("gqa", source, out, "--groups", 4, "--dtype", "bfloat16", "--dry-run"))
    ok(convert("gqa", source, out, "--groups", 4, "--force", "--dry-run"))
    one = checkpoint(name="one", num_key_value_heads=1)
    assert "hint: make a latent of it with `convert mla`, or copy it with --force" in convert("mqa", one, tmp_path / "b").stderr


def test_a_latent_without_a_size_takes_half_of_the_cache(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    given = "mla", checkpoint(), tmp_path / "out", "--method", "svd", "--no-text", "--dry-run", "--json"
    plan = json.loads(ok(convert(*given)).stdout)
    assert plan == json.loads(ok(convert(*given, "--kv-budget", "50%")).stdout)
    assert 2 * plan["kv_bytes_per_token_after"] <= plan["kv_bytes_per_token_before"]


BLOCKS = ["--calibration-tokens", 1000, "--calibration-context", 50]


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
        blocks = {"tokens": 1000, "context": 50, "max_context": 50, "retrieval_limit": None}
        assert provenance["calibration"] == {"text": "text.txt", "texts": texts} | blocks


def test_a_text_in_shorter_blocks_is_another_calibration(finished: Find, convert: Convert, tmp_path: Path) -> None:
    """Heads are repeated, too, with what measured them."""
    made = finished("heads with text")
    texts = [{"text": "text.txt", "tokens": 256, "hash": made.provenance["calibration_hash"]}]
    blocks = {"tokens": 256, "context": 32, "max_context": 128, "retrieval_limit": 128}
    assert made.provenance["calibration"] == {"text": "text.txt", "texts": texts} | blocks
    recipe = made.provenance["recipe"]["gqa"]
    assert (recipe["calibration_tokens"], recipe["calibration_context"], recipe["refit"]) == (256, 32, True)
    ok(convert("run", made.path, tmp_path / "again", "--evaluate", made.command[-1]))
    same_but_for_the_run(made.path, tmp_path / "again")


def test_a_shorter_context_is_a_choice_of_its_own(shelf: Make, convert: Convert, letters: Path, tmp_path: Path) -> None:
    command = ("mla", shelf(head_dim=16), tmp_path / "out", "--kv-lora-rank", 24, "--qk-rope-head-dim", 8, "--text", letters)
    command += ("--calibration-tokens", 512, "--calibration-context", 32, "--max-context", 64)
    assert "in blocks of 32 for contexts of 64" in ok(convert(*command, "--dry-run")).stdout
    ok(convert(*command))
    found = read(tmp_path / "out" / "conversion.json")
    assert found["calibration"]["max_context"] == found["recipe"]["mla"]["max_context"] == 64
    assert read(tmp_path / "out" / "config.json")["max_position_embeddings"] == 64


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
