"""The bundled checkpoint and what the demo makes of it."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import raising

from convert.demo.showcase import HELD_OUT, MODEL, VALIDATION, held_out_text
from convert.planning.sizes import LatentSize


def test_the_bundled_checkpoint_is_small_truly_multi_head_and_trained_to_the_end() -> None:
    config, record = (json.loads((MODEL / f"{name}.json").read_text()) for name in ("config", "training"))
    assert config["num_attention_heads"] == config["num_key_value_heads"] >= 8
    assert (config["max_position_embeddings"], config["dtype"]) == (512, "bfloat16")
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 12_000_000
    assert record["training_token_hash"].startswith("sha256:")
    losses = [point["loss"] for point in record["validation_loss"]]
    assert losses[0] - losses[-1] > 1
    assert abs(losses[-1] - losses[-2]) < 0.02


def test_held_out_modules_are_not_in_the_training_text() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train_demo.py"))
    documents = {line for document in script["training_documents"]() for line in document.splitlines()}
    assert sum(map(len, documents)) > 1_000_000
    for module in HELD_OUT + VALIDATION:
        source = held_out_text((module,))
        assert len(source) > 5_000
        lines = [line for line in source.splitlines() if len(line) > 60]
        seen = sum(line in documents for line in lines)
        assert seen < 0.05 * len(lines), module


def test_an_interrupted_demo_advises_what_it_can_do(
    convert: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.sweeping.convert", raising(KeyboardInterrupt()))
    result = convert("demo", "--output", tmp_path / "demo", "-q")
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted\nhint: the same command begins again\n"


def test_the_demo_converts_evaluates_and_reports(
    convert: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {VALIDATION: slice(2_500), ("difflib", "statistics"): slice(8_000, 11_000)}
    monkeypatch.setattr("convert.demo.showcase._CALIBRATION_TOKENS", 2048)
    monkeypatch.setattr("convert.demo.showcase._GROUPS", (4, 1))
    monkeypatch.setattr("convert.demo.showcase._SIZES", (LatentSize(48, 16),))
    monkeypatch.setattr("convert.demo.showcase.held_out_text", lambda modules: held_out_text(("statistics",))[parts[modules]])
    demo = tmp_path / "demo"
    result = convert("demo", "--output", demo, "--json", "-q")
    assert result.exit_code == 0, result.output
    assert "report.html" in result.stderr
    source, *others = json.loads(result.stdout)["models"]
    assert source["kind"] == "MHA"
    assert source["perplexity"] < 40
    by_method = {(entry["method"], entry["kind"]): entry for entry in others}
    assert len(by_method) == 2 * 2 + 2
    by_name = {entry["name"]: entry["loss_nats"] for entry in others}
    for method in ("mean", "aligned"):
        losses = [by_method[method, kind]["loss_nats"] for kind in ("GQA-4", "MQA")]
        assert 0 < losses[0] < losses[1]
    for kind in ("GQA-4", "MQA"):
        assert by_method["aligned", kind]["loss_nats"] < by_method["mean", kind]["loss_nats"] / 2
    assert 0 < by_name["mla-48+16-weighted"] < by_name["mla-48+16-pca"] < by_method["mean", "MQA"]["loss_nats"]
    assert {method for method, kind in by_method if by_method[method, kind]["calibration_hash"] is None} == {"mean"}
    names = [f"gqa-{groups}-{method}" for groups in (4, 1) for method in ("aligned", "mean")]
    names += [f"mla-48+16-{method}" for method in ("weighted", "pca")]
    there = {path.name for path in demo.iterdir()}
    assert there == {*names, "report", "calibration.txt"}
    assert [entry["name"] for entry in others] == names
    (demo / "report" / "mine.txt").write_text("mine")
    monkeypatch.setattr("convert.demo.showcase._GROUPS", (4,))
    monkeypatch.setattr("convert.demo.showcase._METHODS", ("mean", "pca"))
    again = json.loads(convert("demo", "--output", demo, "--json", "-q").stdout)
    assert again["models"] == [source, by_method["mean", "GQA-4"], by_method["pca", "MLA-48+16"]]
    assert (demo / "report" / "mine.txt").read_text() == "mine"
