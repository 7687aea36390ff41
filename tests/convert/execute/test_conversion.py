"""What a conversion says of its result: for how many positions it is calibrated, and what changes nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from written import Convert, Find, Make, ok, read

import attention
from convert import inspect
from eval import evaluate

POSITIONS = {"calibrated_positions": 32, "source_positions": 128, "max_position_embeddings": 32}
SAID = "calibrated for 32 of its source's 128 positions: beyond, its text may become garbage"


def test_every_place_says_it(finished: Find, convert: Convert, letters: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, whole = finished("latent with text"), finished("heads")
    source, out = made.source, made.path
    assert f"{SAID} (--calibration-context N calibrates for N)" in made.stdout.splitlines()
    assert made.provenance.items() >= POSITIONS.items()
    assert made.config.items() >= POSITIONS.items()
    assert f"\n**This model is {SAID}.**\n" in made.card
    assert "calibrated for" not in whole.card + whole.stdout
    assert not POSITIONS.keys() & whole.provenance.keys()

    found = inspect(out)
    assert found.items() >= {"converted_from": str(source), "method": "weighted", "calibrated_positions": 32}.items()
    assert found["notes"] == [f"it is {SAID}"]
    assert "converted_from" not in inspect(source)

    caplog.clear()
    with caplog.at_level(logging.WARNING, "kvfold"):
        attention.load(source)
        assert not caplog.messages
        attention.load(out)
    assert caplog.messages == [f"{out} is {SAID}"]

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


# ---- what changes nothing, and what is not said --------------------------------------------------------------------


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
    latent = checkpoint("deepseek_v3")
    again = convert("mla", latent, tmp_path / "c", "--kv-lora-rank", 16, "--qk-rope-head-dim", 8)
    assert "is MLA-16+8 already" in again.stderr


def test_a_latent_without_a_size_takes_half_of_the_cache(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    given = "mla", checkpoint(), tmp_path / "out", "--method", "svd", "--no-text", "--dry-run", "--json"
    plan = json.loads(ok(convert(*given)).stdout)
    assert plan == json.loads(ok(convert(*given, "--kv-budget", "50%")).stdout)
    assert 2 * plan["kv_bytes_per_token_after"] <= plan["kv_bytes_per_token_before"]
