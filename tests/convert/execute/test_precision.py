"""Layers that a format keeps precise: measured on the result, written where the cache finds them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_mla import tokens
from written import Convert, Make, characters, damage, ok, raising, read, same_but_for_the_run

from attention import load
from attention.errors import Failure
from attention.formats import FORMATS
from attention.spec import AttentionSpec
from convert.execute import precision

MIXED = FORMATS["mixed"]
TO_MLA = ("--kv-lora-rank", 16, "--qk-rope-head-dim", 8, "--cache-dtype", "mixed", "--calibration-context", 32,
          "--calibration-tokens", 512)  # fmt: skip
ALONE = "layers.1."


def silence(weights: dict[str, Any]) -> None:
    """Leave attention to one layer: the outputs of the others are zero."""
    for name in weights:
        if name.endswith("o_proj.weight") and ALONE not in name:
            weights[name].zero_()


@pytest.fixture
def command(checkpoint: Make, tmp_path: Path) -> list[Any]:
    source = damage(checkpoint(num_hidden_layers=5), silence)
    return ["mla", *TO_MLA, "--text", characters(tmp_path / "text.txt"), source, tmp_path / "out"]


def forms(model: Any) -> list[str]:
    return [layer.form.name for layer in model(tokens(1, 5)).past_key_values.layers]


def test_the_layer_whose_rounding_costs_most_is_precise(command: list[Any], convert: Convert, tmp_path: Path) -> None:
    out, said = command[-1], ok(convert(*command)).stdout
    assert "mixed keeps the layers that copy in 4 to 7 bits: 1 of 5" in said
    assert read(out / "conversion.json")["precise_layers"] == read(out / "config.json")["precise_layers"] == [1]
    model = load(out, cache_dtype="mixed")
    assert forms(model) == ["mixed", "4 to 7 bits", "mixed", "mixed", "mixed"]
    held = sum(layer.nbytes for layer in model(tokens(1, 5)).past_key_values.layers)
    assert held == 5 * AttentionSpec.from_config(model.config).bytes_per_token("mixed")
    assert held == 5 * read(out / "conversion.json")["kv_bytes_per_token"]["after"]
    assert forms(load(out, cache_dtype="int8")) == ["int8"] * 5
    ok(convert("run", out, tmp_path / "again"))
    same_but_for_the_run(out, tmp_path / "again")


def test_without_memory_for_the_experiment_a_layer_past_the_middle_is(
    command: list[Any], convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there is memory when the run is resumed: what was healed in between has read such a cache."""
    with monkeypatch.context() as patch:
        patch.setattr(precision, "lacks_room", lambda *_: "it takes 9.0 GB, and cpu has 8.0 GB free")
        patch.setattr("convert.converting.heal_result", raising(KeyboardInterrupt()))
        stopped = convert(*command)
    assert "which layers copy was not measured, and mixed keeps some past the middle precise: it takes 9.0 GB" in stopped.stderr
    out, resumed = command[-1], ok(convert(*command, "--resume"))
    assert "precise_layers" not in read(out / "config.json").keys() | read(out / "conversion.json").keys()
    assert forms(load(out, cache_dtype="mixed")) == ["mixed", "mixed", "mixed", "4 to 7 bits", "mixed"]
    assert "was not measured" not in resumed.stderr


def test_what_was_measured_is_not_measured_again(command: list[Any], convert: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("convert.converting.heal_result", raising(KeyboardInterrupt()))
        assert convert(*command).exit_code
    monkeypatch.setattr(precision, "_costs", raising(AssertionError("measured again")))
    ok(convert(*command, "--resume"))
    assert read(command[-1] / "config.json")["precise_layers"] == [1]


@pytest.mark.parametrize(("tokens", "positions"), [(3, "enough"), (512, 7)])
def test_a_text_or_a_model_that_is_too_short_is_refused(tokens: int, positions: Any) -> None:
    with pytest.raises(Failure, match=f"copies need 8 tokens of text and 8 positions, and there are {tokens} and {positions}"):
        precision._copies(SimpleNamespace(ids=torch.arange(tokens)), None if positions == "enough" else positions)


def test_runs_of_a_text_come_back_behind_twice_as_much_text() -> None:
    ids, first = precision._copies(SimpleNamespace(ids=torch.arange(2000, 3000)), 8192)
    assert (ids.shape, first) == ((8, 128), 97)
    assert torch.equal(ids[:, :32], ids[:, 96:])
    assert torch.equal(ids[:, 32:96], torch.arange(2000, 2512).view(8, 64))
    assert precision._copies(SimpleNamespace(ids=torch.arange(50)), 20).ids.shape == (5, 20)


def test_one_latent_of_eight_is_precise_and_none_with_a_window() -> None:
    spec = AttentionSpec(16, 4, 4, 64).latent(64, 16)
    assert (spec.count_precise(MIXED), spec.count_precise(FORMATS["int8"])) == (2, 0)

    def precise(spec: AttentionSpec) -> list[int]:
        return [layer for layer in range(16) if spec.format_of(layer, MIXED) != MIXED]

    assert precise(spec) == [10, 11], "where nothing was measured"
    assert precise(replace(spec, precise=(4, 9, 1))) == [4, 9]
    windowed = replace(spec, windows=(*[32] * 8, *[None] * 8))
    assert (windowed.unbounded, precise(windowed)) == (tuple(range(8, 16)), [13])
    assert precise(spec.keeping(range(13), 4)) == [], "three latents"
    assert precise(spec.keeping(range(12), 4)) == [14], "four"
