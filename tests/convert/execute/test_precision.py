"""Layers that a format keeps precise: measured on the result, written where the cache finds them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_mla import tokens
from written import Convert, Make, characters, damage, ok, read, same_but_for_the_run

from attention import load
from attention.formats import FORMATS
from attention.spec import AttentionSpec
from convert.execute import precision

MIXED = FORMATS["mixed"]
TO_MLA = ("--kv-lora-rank", 16, "--qk-rope-head-dim", 8, "--cache-dtype", "mixed", "--calibration-context", 32)


ALONE = "layers.1."


def silence(weights: dict[str, Any]) -> None:
    """Leave attention to one layer: the outputs of the others are zero."""
    for name in weights:
        if name.endswith("o_proj.weight") and ALONE not in name:
            weights[name].zero_()


@pytest.fixture
def converted(checkpoint: Make, convert: Convert, tmp_path: Path) -> Callable[[], Path]:
    def make() -> Path:
        source, out = damage(checkpoint(num_hidden_layers=5), silence), tmp_path / "out"
        said = ok(convert("mla", *TO_MLA, "--text", characters(tmp_path / "text.txt"), source, out)).stdout
        assert "mixed has more bits in 1 of 5 layers, which copy" in said
        return out

    return make


def forms(model: Any) -> list[str]:
    return [layer.form.name for layer in model(tokens(1, 5)).past_key_values.layers]


def test_the_layer_whose_rounding_costs_most_is_precise(
    converted: Callable[[], Path], convert: Convert, tmp_path: Path
) -> None:
    out = converted()
    assert read(out / "conversion.json")["precise_layers"] == read(out / "config.json")["precise_layers"] == [1]
    model = load(out, cache_dtype="mixed")
    assert forms(model) == ["mixed", "6 bits", "mixed", "mixed", "mixed"]
    held = sum(layer.nbytes for layer in model(tokens(1, 5)).past_key_values.layers)
    assert held == 5 * AttentionSpec.from_config(model.config).bytes_per_token("mixed")
    assert held == 5 * read(out / "conversion.json")["kv_bytes_per_token"]["after"]
    assert forms(load(out, cache_dtype="int8")) == ["int8"] * 5
    ok(convert("run", out, tmp_path / "again"))
    same_but_for_the_run(out, tmp_path / "again")


def test_without_memory_for_the_experiment_a_layer_past_the_middle_is(
    converted: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, warned: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(precision, "lacks_room", lambda *_: "it takes 9.0 GB, and cpu has 8.0 GB free")
    out = converted()
    assert "precise_layers" not in json.loads((out / "config.json").read_text())
    assert forms(load(out, cache_dtype="mixed")) == ["mixed", "mixed", "mixed", "6 bits", "mixed"]


def test_one_latent_of_eight_is_precise_and_none_with_a_window() -> None:
    spec = AttentionSpec(16, 4, 4, 64).latent(64, 16)
    assert (spec.count_precise(MIXED), spec.count_precise(FORMATS["int8"])) == (2, 0)

    def precise(spec: AttentionSpec) -> list[int]:
        return [layer for layer in range(16) if spec.format_of(layer, MIXED) != MIXED]

    assert precise(spec) == [10, 11], "where nothing was measured"
    assert precise(replace(spec, precise=(4, 9, 1))) == [4, 9]
    windowed = replace(spec, windows=(*[32] * 8, *[None] * 8))
    assert (windowed.unbounded, precise(windowed)) == (tuple(range(8, 16)), [13])
    assert precise(spec.keeping(range(14), 4)) == [], "two latents"
