"""Layers converted in order: each step brings the result closer, and an interruption costs no layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import full_size
from rows import rows
from written import layer_notes, ok, same_but_for_the_run, silence, weights

from convert.calibration.refine import _TOLERATED
from convert.calibration.stream import LayerStream
from convert.checkpoint.shelf import Shelf
from convert.execute.layer import Layer

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]

SIZES: dict[str, list[Any]] = {
    "gqa": ["--groups", 2],
    "mla": ["--kv-lora-rank", 16, "--qk-rope-head-dim", 8],
}
# Where steps have much to gain, which a little text is enough for.
BLIND = {"gqa": [*SIZES["gqa"], "--method", "mean"], "mla": [*SIZES["mla"], "--method", "svd"]}


def nats_lost(path: Path, source: Path, letters: Path) -> float:
    """KL of what the result says to what the source says, on the start of the text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(source)(letters.read_text()[:256], return_tensors="pt")["input_ids"][:, :256].view(
        8, 32
    )
    said = []
    for model in (source, path):
        with torch.inference_mode():
            said.append(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits.log_softmax(-1))
    return float((said[0].exp() * (said[0] - said[1])).sum(-1).mean())


@pytest.mark.parametrize("command", SIZES)
def test_each_step_brings_the_result_closer(
    command: str, checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    source, lost = checkpoint(num_key_value_heads=8, num_hidden_layers=2), {}
    on = [*on, "--calibration-tokens", 1024]
    ways: dict[str, list[Any]] = {
        "blind": [], "method": [*on, "--no-refit"], "refit": on, "refine": [*on, "--refine", 10],
    }  # fmt: skip
    for name, way in ways.items():
        ok(convert(command, source, tmp_path / name, *SIZES[command], *way))
        lost[name] = nats_lost(tmp_path / name, source, letters)
    assert lost["blind"] > lost["refit"] > lost["refine"]
    assert lost["method"] > lost["refit"]
    errors = {name: [note["output_error"] for note in layer_notes(tmp_path / name)] for name in ("method", "refit")}
    assert 0 < sum(errors["refit"]) < sum(errors["method"])


@pytest.mark.slow  # the same steps over records of a latent, each of which is fitted in tests of its own
def test_each_step_brings_a_latent_of_a_latent_closer(
    checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    full, lost = tmp_path / "full", {}
    on = [*on, "--calibration-tokens", 1024]
    ok(convert("mla", checkpoint(), full, *full_size(4, 8)))
    for name, way in {"blind": [], "refit": on, "refined": [*on, "--no-refit", "--refine", 8]}.items():
        ok(convert("mla", full, tmp_path / name, "--kv-lora-rank", 20, "--qk-rope-head-dim", 4, *way))
        lost[name] = nats_lost(tmp_path / name, full, letters)
    assert lost["blind"] > max(lost["refit"], lost["refined"])
    found = [(note["layer_error_refined"], note["layer_error"]) for note in layer_notes(tmp_path / "refined")]
    assert all(0 < after <= _TOLERATED * before for after, before in found)
    assert any(after < before for after, before in found)


@pytest.mark.parametrize("command", SIZES)
def test_refinement_brings_every_layer_closer_and_touches_nothing_else(
    command: str, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert(command, source, tmp_path / "out", *BLIND[command], *on, "--refine", 10))
    assert [note["layer"] for note in layer_notes(tmp_path / "out")] == [0, 1, 2]
    assert all(0 < note["layer_error_refined"] < note["layer_error"] for note in layer_notes(tmp_path / "out"))
    before, after = weights(source), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before if "self_attn" not in name)
    ok(convert(command, source, tmp_path / "none", *SIZES[command], *on))
    assert not any("layer_error" in note for note in layer_notes(tmp_path / "none"))


def test_refinement_follows_its_seed(
    checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.calibration.refine._TOKENS", 64)  # two blocks a step, so that their order matters
    source = checkpoint()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        ok(convert("gqa", source, tmp_path / name, *BLIND["gqa"], *on, "--refine", 12, "--seed", seed))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")
    a, c = weights(tmp_path / "a"), weights(tmp_path / "c")
    differing = {name for name in a if not torch.equal(a[name], c[name])}
    assert differing
    assert all("self_attn" in name for name in differing)


@pytest.mark.parametrize("method", ["mean", "first"])
def test_methods_that_look_at_weights_alone_can_be_refitted(
    method: str, checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--method", method, *on, "--refit"))
    ok(convert("gqa", source, tmp_path / "plain", "--groups", 2, "--method", method))
    refused = convert("gqa", source, tmp_path / "no", "--groups", 2, "--method", method, *on)
    assert refused.exit_code == 2
    assert f"method {method} looks at weights only and has no use for" in refused.stderr
    assert nats_lost(tmp_path / "out", source, letters) < nats_lost(tmp_path / "plain", source, letters)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["calibration_hash"].startswith("sha256:")


@pytest.mark.parametrize("command", SIZES)
def test_a_layer_that_adds_nothing_is_left_alone_by_refinement(
    command: str, checkpoint: Make, convert: Convert, logits: Logits, on: list[Any], tmp_path: Path
) -> None:
    ok(convert(command, silence(checkpoint(), 0), tmp_path / "out", *BLIND[command], *on, "--refine", 3))
    found = layer_notes(tmp_path / "out")
    assert found[0]["layer_error"] == found[0]["layer_error_refined"] == 0
    assert 0 < found[1]["layer_error_refined"] < found[1]["layer_error"]
    assert torch.isfinite(logits(tmp_path / "out")).all()


# ---- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "count"),
    rows(
        [(Layer, "of", 1), (Layer, "of", 2), (Layer, "of", 3), *((LayerStream, "advance", count) for count in range(1, 6))],
        [(Layer, "of", 2), (LayerStream, "advance", 1), (LayerStream, "advance", 4)],
    ),
)
def test_an_interrupted_sequence_is_resumed_to_the_same_bytes(
    owner: type, name: str, count: int, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source, options, left, made = checkpoint(), ["--groups", 2, *on, "--refine", 3], [count], []
    function, put = getattr(owner, name), Shelf.put

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        assert convert("gqa", source, tmp_path / "out", *options).exit_code == 130
    there = {path.name for path in (tmp_path / "out.partial" / "steps").glob("layer-*.safetensors")}
    again: list[LayerStream] = []
    with monkeypatch.context() as patch:
        patch.setattr(Shelf, "put", lambda self, layer, *what: made.append(layer) or put(self, layer, *what))
        patch.setattr(LayerStream, "embed", again.append)
        ok(convert("gqa", source, tmp_path / "out", *options, "--resume"))
    assert made == list(range(len(there), 3)), "no layer is fitted twice"
    assert not again, "neither stream begins anew"
    ok(convert("gqa", source, tmp_path / "whole", *options))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("name", "command"),
    [("layer-00001", ["gqa", "--groups", 2]), ("source-00001", ["mla", "--kv-lora-rank", 24, "--qk-rope-head-dim", 8])],
)
def test_a_layer_whose_file_lost_its_end_is_made_again(
    name: str, command: list[Any], checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source, (command, *sizes), fit, left = checkpoint(), command, Layer.of, [3]
    options = [*sizes, *on, "--refine", 3]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return fit(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Layer, "of", interrupted)
        assert convert(command, source, tmp_path / "out", *options).exit_code == 130
    (damaged,) = (tmp_path / "out.partial" / "steps").glob(f"{name}.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-7])
    ok(convert(command, source, tmp_path / "out", *options, "--resume"))
    ok(convert(command, source, tmp_path / "whole", *options))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("spool", ["source-inputs", "teacher", "student"])
def test_inputs_that_a_crash_left_as_zeros_are_made_again(
    spool: str, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, left = checkpoint(), [2 if spool == "source-inputs" else 4]
    options, advance = ["--kv-lora-rank", 24, "--qk-rope-head-dim", 8, *on], LayerStream.advance

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return advance(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "advance", interrupted)
        assert convert("mla", source, tmp_path / "out", *options).exit_code == 130
    damaged = list((tmp_path / "out.partial" / "steps").glob(f"{spool}-[0-9]"))
    assert damaged
    for file in damaged:
        file.write_bytes(bytes(file.stat().st_size))
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))
    ok(convert("mla", source, tmp_path / "whole", *options))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")
