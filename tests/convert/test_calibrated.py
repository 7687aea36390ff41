"""Whole conversions on calibration text: least squares, gradient refinement, layers in sequence, similar heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from written import ok, same_but_for_the_run, weights

from convert.calibration.stream import LayerStream
from convert.checkpoint.shelf import Shelf
from convert.execute import deciding
from convert.execute.layer import Layer
from convert.families import FAMILIES

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]

SWITCHES = dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias", "qk_layernorm", "use_qk_norm"), True)
SMALL: dict[str, list[Any]] = {
    "gqa": ["--groups", 2],
    "mla": ["--kv-lora-rank", 16, "--qk-rope-head-dim", 8],
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Characters in an order that never repeats."""
    drawn = torch.randint(97, 123, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path / "text.txt"
    path.write_text("".join(map(chr, drawn)))
    return path


@pytest.fixture
def on(text: Path) -> list[Any]:
    """The options that name it, for a few short blocks."""
    return ["--text", text, "--calibration-tokens", 256, "--calibration-context", 32]


def notes(path: Path) -> list[dict[str, Any]]:
    return list(json.loads((path / "conversion.json").read_text())["layers"])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


# ---- families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_calibrated_and_equal_heads_stay_lossless(
    model_type: str, checkpoint: Make, convert: Convert, logits: Logits, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint(model_type, duplicated=2, num_hidden_layers=2, **SWITCHES)
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, *on))
    assert distance(logits(tmp_path / "out"), logits(source)) < 1e-3
    ok(convert("mqa", source, tmp_path / "one", *on, "--refine", 1))
    assert torch.isfinite(logits(tmp_path / "one")).all()
    assert (logits(tmp_path / "one") - logits(source)).abs().max() > 1e-3
    before, after = weights(source), weights(tmp_path / "one")
    assert all(torch.equal(before[name], after[name]) for name in before if "self_attn" not in name)


# ---- what text does ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [[], ["--propagate"], ["--refine", 2]], ids=str)
def test_as_many_groups_as_heads_copies_every_bit_with_text_too(
    way: list[Any], checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "out", "--groups", 4, *on, *way))
    before, after = weights(source), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["notes"][1] == "the calibration text is not used"


def test_a_plan_shows_the_steps_beyond_the_method(checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path) -> None:
    command = ["gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--dry-run"]
    ways: dict[str, list[Any]] = {
        "with --refit": on,
        "with --grouping similar, --propagate, --refine 7": [
            *on, "--grouping", "similar", "--propagate", "--no-refit", "--refine", 7,
        ],
        "with --grouping similar": ["--grouping", "similar"],
    }  # fmt: skip
    for line, way in ways.items():
        assert ok(convert(*command, *way)).stdout.splitlines()[1] == line
    assert "\nwith " not in ok(convert(*command)).stdout


def nats_lost(path: Path, source: Path, text: Path) -> float:
    """KL of what the result says to what the source says, on what was calibrated on."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(source)(text.read_text()[:256], return_tensors="pt")["input_ids"][:, :256].view(8, 32)
    said = []
    for model in (source, path):
        with torch.inference_mode():
            said.append(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits.log_softmax(-1))
    return float((said[0].exp() * (said[0] - said[1])).sum(-1).mean())


@pytest.mark.parametrize("command", SMALL)
def test_each_step_brings_the_result_closer(
    command: str, checkpoint: Make, convert: Convert, on: list[Any], text: Path, tmp_path: Path
) -> None:
    source, lost = checkpoint(num_key_value_heads=8), {}
    ways: dict[str, list[Any]] = {
        "blind": [], "method": [*on, "--no-refit"], "refit": on, "refine": [*on, "--refine", 20],
    }  # fmt: skip
    for name, way in ways.items():
        ok(convert(command, source, tmp_path / name, *SMALL[command], *way))
        lost[name] = nats_lost(tmp_path / name, source, text)
    assert lost["blind"] > lost["refit"] > lost["refine"]
    assert lost["method"] > lost["refit"]


@pytest.mark.parametrize("command", SMALL)
def test_refinement_brings_every_layer_closer_and_touches_nothing_else(
    command: str, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert(command, source, tmp_path / "out", *SMALL[command], *on, "--refine", 10))
    assert [note["layer"] for note in notes(tmp_path / "out")] == [0, 1, 2]
    assert all(0 < note["layer_error_refined"] < note["layer_error"] for note in notes(tmp_path / "out"))
    before, after = weights(source), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before if "self_attn" not in name)
    ok(convert(command, source, tmp_path / "none", *SMALL[command], *on))
    assert not any("layer_error" in note for note in notes(tmp_path / "none"))


def test_refinement_follows_its_seed(
    checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.calibration.refine._TOKENS", 64)  # two blocks a step, so that their order matters
    source = checkpoint()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        ok(convert("gqa", source, tmp_path / name, "--groups", 2, *on, "--refine", 3, "--seed", seed))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")
    a, c = weights(tmp_path / "a"), weights(tmp_path / "c")
    differing = {name for name in a if not torch.equal(a[name], c[name])}
    assert differing
    assert all("self_attn" in name for name in differing)


@pytest.mark.parametrize("method", ["mean", "first", "random"])
def test_methods_that_look_at_weights_alone_can_be_refitted(
    method: str, checkpoint: Make, convert: Convert, on: list[Any], text: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--method", method, *on, "--refit"))
    ok(convert("gqa", source, tmp_path / "plain", "--groups", 2, "--method", method))
    refused = convert("gqa", source, tmp_path / "no", "--groups", 2, "--method", method, *on)
    assert refused.exit_code == 2
    assert f"method {method} looks at weights only and has no use for" in refused.stderr
    assert nats_lost(tmp_path / "out", source, text) < nats_lost(tmp_path / "plain", source, text)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["calibration_hash"].startswith("sha256:")


def test_propagation_changes_what_later_layers_see(checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "plain", "--groups", 2, *on, "--no-refit"))
    ok(convert("gqa", source, tmp_path / "through", "--groups", 2, *on, "--no-refit", "--propagate"))
    plain, through = weights(tmp_path / "plain"), weights(tmp_path / "through")
    assert {name.split(".")[2] for name in plain if not torch.equal(plain[name], through[name])} == {"1", "2"}


def test_a_text_in_shorter_blocks_is_another_calibration(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "a", "--groups", 2, "--text", text, "--calibration-tokens", 256,
               "--calibration-context", 32))  # fmt: skip
    record = json.loads((tmp_path / "a" / "conversion.json").read_text())
    assert record["calibration"] == {"text": "text.txt", "tokens": 256}
    recipe = record["recipe"]["gqa"]
    assert (recipe["calibration_tokens"], recipe["calibration_context"], recipe["refit"]) == (256, 32, True)
    ok(convert("run", tmp_path / "a" / "conversion.json", "--set", f"output={tmp_path / 'b'}"))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")


def silence(source: Path, layer: int) -> Path:
    """A model of which one layer adds nothing, as after pruning."""
    tensors = load_file(source / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.{layer}.{name}.weight"].zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_a_layer_that_adds_nothing_has_no_part_in_decisions(
    checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = silence(checkpoint(), 1)
    for name, layers in (("silent", 3), ("speaking", 2)):
        monkeypatch.setattr(deciding, "_TRIED_LAYERS", layers)  # layers 0, 1 and 2; layers 0 and 2
        ok(convert("mla", source, tmp_path / name, "--kv-budget", "25%", *on))
    silent, speaking = (json.loads((tmp_path / name / "conversion.json").read_text()) for name in ("silent", "speaking"))
    tried, expected = (r["rotary_frequencies_tried"] for r in (silent, speaking))
    assert len(tried) > 1
    for ours, theirs in zip(tried, expected, strict=True):
        assert ours["output_error"] == pytest.approx(theirs["output_error"] * 2 / 3)


@pytest.mark.parametrize("command", SMALL)
def test_a_layer_that_adds_nothing_is_left_alone_by_refinement(
    command: str, checkpoint: Make, convert: Convert, logits: Logits, on: list[Any], tmp_path: Path
) -> None:
    ok(convert(command, silence(checkpoint(), 0), tmp_path / "out", *SMALL[command], *on, "--refine", 3))
    found = notes(tmp_path / "out")
    assert found[0]["layer_error"] == found[0]["layer_error_refined"] == 0
    assert 0 < found[1]["layer_error_refined"] < found[1]["layer_error"]
    assert torch.isfinite(logits(tmp_path / "out")).all()


# ---- similar heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_text", [False, True])
def test_similar_heads_that_are_apart_are_grouped_and_lossless(
    with_text: bool, checkpoint: Make, convert: Convert, logits: Logits, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint(num_key_value_heads=4, duplicated=2)  # heads 0 and 1 are equal, and 2 and 3
    tensors = load_file(source / "model.safetensors")
    order = torch.tensor([0, 2, 1, 3])
    for name in tensors:
        if any(part in name for part in (".q_proj.", ".k_proj.", ".v_proj.")):
            tensors[name] = tensors[name].unflatten(0, (4, -1))[order].flatten(0, 1).contiguous()
        elif ".o_proj.weight" in name:
            tensors[name] = tensors[name].unflatten(1, (4, -1))[:, order].flatten(1).contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    given = on if with_text else []
    ok(convert("gqa", source, tmp_path / "similar", "--groups", 2, "--grouping", "similar", *given))
    ok(convert("gqa", source, tmp_path / "neighbours", "--groups", 2, *given))
    assert distance(logits(tmp_path / "similar"), logits(source)) < (1e-3 if with_text else 1e-4)
    assert distance(logits(tmp_path / "neighbours"), logits(source)) > 1e-2
    recipe = json.loads((tmp_path / "similar" / "conversion.json").read_text())["recipe"]["gqa"]
    assert recipe["grouping"] == "similar"
    ok(convert("run", tmp_path / "similar" / "conversion.json", "--set", f"output={tmp_path / 'again'}"))
    same_but_for_the_run(tmp_path / "similar", tmp_path / "again")


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"attn_logit_softcapping": 50.0, "sliding_window": 64}, ["attn_logit_softcapping"]),
        ({"attn_logit_softcapping": None, "sliding_window": 16}, ["sliding_window"]),
        ({"attn_logit_softcapping": None, "sliding_window": 64}, []),
    ],
    ids=["capped", "windows within blocks", "windows beyond blocks"],
)
def test_a_plan_says_why_queries_are_not_refitted(
    settings: dict[str, Any], fields: list[str], checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fitted = []
    monkeypatch.setattr(deciding, "refitted_queries", lambda before, after, x: fitted.append(x) or after)
    source = checkpoint("gemma2", num_hidden_layers=2, **settings)
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, *on))
    said = [note for note in json.loads((tmp_path / "out" / "conversion.json").read_text())["notes"] if "refitted" in note]
    assert [note.split(": ")[1].removesuffix(" changes what heads attend to") for note in said] == fields
    assert bool(fitted) == (not fields)


@pytest.mark.parametrize("way", [[], ["--method", "mean", "--refit"]], ids=str)
def test_a_plan_says_that_normalised_queries_are_not_refitted(
    way: list[Any], checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    command = ["gqa", checkpoint("qwen3"), tmp_path / "out", "--groups", 2, "--dry-run", *on, *way]
    note = "queries are not refitted, outputs are: they are normalised after their projection"
    assert note in ok(convert(*command)).stdout.splitlines()
    command[1] = checkpoint("qwen2", name="other")
    assert "not refitted" not in ok(convert(*command)).stdout


def test_a_method_that_cannot_tell_similar_heads_is_refused(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    command = ["gqa", checkpoint(), tmp_path / "out", "--groups", 2, "--method", "mean"]
    result = convert(*command, "--grouping", "similar")
    assert result.exit_code == 2
    assert "method mean does not say which heads are similar" in result.stderr
    assert "use --method aligned for that" in result.stderr
    assert convert(*command, "--grouping", "alike").exit_code == 2


# ---- interruption --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [(Layer, "of", 1), (Layer, "of", 2), (Layer, "of", 3), *((LayerStream, "advance", count) for count in range(3, 8))],
)
def test_an_interrupted_sequence_is_resumed_to_the_same_bytes(
    owner: type, name: str, count: int, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source, options, left, made = checkpoint(), ["--groups", 2, *on, "--refine", 3, "--propagate"], [count], []
    function, put = getattr(owner, name), Shelf.put

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        assert convert("gqa", source, tmp_path / "out", *options).exit_code == 130
    there = {path.name for path in (tmp_path / "out.partial" / "survey").glob("layer-*.safetensors")}
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


@pytest.mark.parametrize("name", ["layer-00001", "source-00001"])
def test_a_layer_whose_file_lost_its_end_is_made_again(
    name: str, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options, fit, left = checkpoint(), ["--groups", 2, *on, "--refine", 3], Layer.of, [3]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return fit(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Layer, "of", interrupted)
        assert convert("gqa", source, tmp_path / "out", *options).exit_code == 130
    (damaged,) = (tmp_path / "out.partial" / "survey").glob(f"{name}.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-7])
    ok(convert("gqa", source, tmp_path / "out", *options, "--resume"))
    ok(convert("gqa", source, tmp_path / "whole", *options))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")


def test_a_text_is_known_by_its_tokens_wherever_it_lies(
    checkpoint: Make, convert: Convert, on: list[Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    source, options = checkpoint(), ["--groups", 2, *on[2:]]
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("convert.execute.weights.write_shard", interrupted)
        assert convert("gqa", source.name, "out", *options, "--text", text.name).exit_code == 130
    (tmp_path / "elsewhere").mkdir()
    text.rename(tmp_path / "elsewhere" / "same.txt")
    text.write_text("another text\n" * 100)
    refused = convert("gqa", source, tmp_path / "out", *options, "--resume", "--text", text)
    assert refused.exit_code == 2
    assert "calibration_hash" in refused.stderr
    ok(convert("gqa", source, tmp_path / "out", *options, "--resume", "--text", tmp_path / "elsewhere" / "same.txt"))


def test_a_record_is_repeated_from_another_directory(
    checkpoint: Make, convert: Convert, on: list[Any], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint()
    monkeypatch.chdir(tmp_path)
    ok(convert("gqa", source.name, "out", "--groups", 2, *on[2:], "--text", text.name))
    assert f"convert gqa {source.name} OUTPUT" in (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ok(convert("run", tmp_path / "out" / "conversion.json", "--set", "output=again"))
    again, first = (path / "model.safetensors" for path in (tmp_path / "elsewhere" / "again", tmp_path / "out"))
    assert again.read_bytes() == first.read_bytes()
