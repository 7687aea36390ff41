"""Whole conversions to latent attention: exactness of every family and RoPE, the files, interruption, bad input."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from written import WITHOUT_KVFOLD, ok, same_but_for_the_run, weights

from attention import load
from attention.spec import AttentionSpec
from convert.calibration.stream import LayerStream
from convert.checkpoint.shelf import Shelf
from convert.execute.layer import Layer
from convert.hosts.deepseek_v3 import _LIKE_LLAMA, constants
from convert.methods import LATENT

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]

WORDS = ("cat", "mat", "sat", "flat", "once", "upon", "a", "time", "there", "was", "the", "and", "of", "moon", "tree", "ran")
SLIDING = ["sliding_attention"] * 3
PLAIN: dict[str, dict[str, Any]] = {
    "seed_oss": {"attention_bias": False, "attention_out_bias": True},
    "smollm3": {"no_rope_layers": [1, 1, 1]},
    "mistral": {"sliding_window": 128},
    "ministral": {"sliding_window": 128, "layer_types": SLIDING},
    "cwm": {"sliding_window": 128, "layer_types": SLIDING},
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 5000.0},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [3.0, 1.0, 4.0, 9.0], "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Words in an order that never repeats, 6,000 characters: 46 blocks of the tiny models' 128 positions."""
    drawn = torch.randint(len(WORDS), (1500,), generator=torch.Generator().manual_seed(0)).tolist()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS[i] for i in drawn)[:6000])
    return path


def size(kv_heads: int, dim: int, width: int = 64) -> list[Any]:
    """The options of full size: every component turns, and the latent holds all the rest."""
    channels = min(width, kv_heads * dim)
    rank = next(r for r in range(channels, channels + 3) if r - len(constants(r)) >= channels)
    return ["--kv-lora-rank", rank, "--qk-rope-head-dim", kv_heads * dim]


SMALL = ["--kv-lora-rank", 16, "--qk-rope-head-dim", 8]


# `weighted` runs with text or without it; with text, queries and outputs are refitted.
WAYS = (*LATENT, "weighted with text")


def method_options(way: str, text: Path) -> list[Any]:
    name, _, with_text = way.partition(" with ")
    given = {"pca": ["--text", text], "weighted": ["--text", text, "--calibration-tokens", 384]}
    return ["--method", name, *(given[name] if name == "pca" or with_text else [])]


def tolerance(way: str) -> float:
    """Where least squares have had their say: their ridge keeps what is exact, but rounding is fitted too."""
    return 1e-3 if way == "weighted with text" else 1e-4


def same_logits(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """To `tolerance` of the largest logit: those of random weights reach tens, and fp32 is relative."""
    assert torch.isfinite(found).all()
    assert float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def logits_of(path: Path, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(ids).logits


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(4, 96, (batch, length), generator=torch.Generator().manual_seed(1))


# ---- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", _LIKE_LLAMA)
@pytest.mark.parametrize("method", WAYS)
def test_full_size_gives_the_sources_logits(
    method: str, model_type: str, checkpoint: Make, convert: Convert, logits: Logits, text: Path, tmp_path: Path
) -> None:
    source = checkpoint(model_type, **PLAIN.get(model_type, {}))
    ok(convert("mla", source, tmp_path / "out", *size(4, 8), *method_options(method, text)))
    same_logits(logits(tmp_path / "out"), logits(source), tolerance(method))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["kv_lora_rank"], config["qk_rope_head_dim"]) == ("deepseek_v3", 33, 32)


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("layers", [[1, 0, 1], [0, 1, 0]])
def test_layers_without_positions_are_carried(
    layers: list[int], method: str, checkpoint: Make, convert: Convert, logits: Logits, text: Path, tmp_path: Path
) -> None:
    """All of their keys go into the latent, which is full at min(E, 2 G D); the key that turns is zero there."""
    source = checkpoint("smollm3", no_rope_layers=layers, hidden_size=96)
    full = ["--kv-lora-rank", 65, "--qk-rope-head-dim", 32, *method_options(method, text)]
    ok(convert("mla", source, tmp_path / "out", *full))
    same_logits(logits(tmp_path / "out"), logits(source), tolerance(method))
    refused = convert("mla", source, tmp_path / "more", "--kv-lora-rank", 66, "--qk-rope-head-dim", 32, "--method", "svd")
    assert "use --kv-lora-rank 65" in refused.stderr
    ok(convert("mla", source, tmp_path / "less", "--kv-lora-rank", 33, "--qk-rope-head-dim", 32, *method_options(method, text)))
    assert (logits(tmp_path / "less") - logits(source)).abs().max() > 1e-3
    kept = weights(tmp_path / "out")
    for layer, turns in enumerate(layers):
        key = kept[f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"][-32:]
        assert bool(key.any()) == bool(turns)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("method", WAYS)
def test_every_scaling_of_rope_is_carried(
    method: str, kind: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source = checkpoint(rope_parameters={"rope_theta": 10000.0, "rope_type": kind, **ROPES[kind]})
    ok(convert("mla", source, tmp_path / "out", *size(4, 8), *method_options(method, text)))
    for length in (12, 100):  # before and beyond original_max_position_embeddings
        same_logits(logits_of(tmp_path / "out", tokens(length)), logits_of(source, tokens(length)), tolerance(method))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert written["rope_type"] == "longrope", "four components of each frequency are no plain stride"


@pytest.mark.parametrize(
    ("kv_heads", "changes"),
    [
        (8, {}), (1, {}), (2, {"num_attention_heads": 16}), (4, {"tie_word_embeddings": True}), (8, {"head_dim": 16}),
        (4, {"head_dim": 4}), (1, {"head_dim": 80}), (4, {"num_hidden_layers": 1}),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("method", WAYS)
def test_every_shape_of_attention_is_carried(
    method: str, kv_heads: int, changes: dict[str, Any], checkpoint: Make, convert: Convert, logits: Logits, text: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    source = checkpoint(num_key_value_heads=kv_heads, **changes)
    ok(convert("mla", source, tmp_path / "out", *size(kv_heads, changes.get("head_dim", 8)), *method_options(method, text)))
    same_logits(logits(tmp_path / "out"), logits(source), tolerance(method))
    assert ("lm_head.weight" in weights(tmp_path / "out")) == ("tie_word_embeddings" not in changes)


@pytest.mark.parametrize("method", WAYS)
def test_less_than_full_size_loses(
    method: str, checkpoint: Make, convert: Convert, logits: Logits, text: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    distance = []
    for rank, rope in ((8, 8), (24, 24), (33, 32)):
        out = tmp_path / f"{rank}"
        ok(convert("mla", source, out, "--kv-lora-rank", rank, "--qk-rope-head-dim", rope, *method_options(method, text)))
        distance.append(float((logits(out) - logits(source)).abs().mean()))
    assert distance[0] > distance[1] > distance[2]
    assert distance[1] > 1e-2
    assert distance[2] < 1e-4
    layers = json.loads((tmp_path / "8" / "conversion.json").read_text())["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2]
    most = 3 if method == "weighted with text" else 1  # least squares do not heed errors that inputs do not show
    assert all(0.1 < layer["output_error"] < most and 0.01 < layer["score_error"] < 2 for layer in layers)
    whole = json.loads((tmp_path / "33" / "conversion.json").read_text())["layers"]
    assert all(layer["output_error"] < 1e-9 and layer["score_error"] < 1e-6 for layer in whole)


def test_default_rope_is_written_where_a_plain_stride_turns(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    ok(convert("mla", checkpoint(), tmp_path / "out", "--kv-lora-rank", 16, "--qk-rope-head-dim", 4, "--method", "pca",
               "--text", text))  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["rotary_frequencies"] == [0, 2]
    assert record["recipe"]["mla"]["freqfold"] == 2


def test_channels_of_zeros_change_nothing(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source, beyond = checkpoint(), ["--kv-lora-rank", 48, "--qk-rope-head-dim", 32]
    result = convert("mla", source, tmp_path / "out", *beyond)
    assert result.exit_code == 2
    assert "rank 48 exceeds full size: at 32 rotary dims" in result.stderr
    assert "have 32 dims, which with 1 constant channel(s) of deepseek_v3 makes 33" in result.stderr
    assert "use --kv-lora-rank 33, or --pad-rank" in result.stderr
    shown = ok(convert("mla", source, tmp_path / "out", *beyond, "--pad-rank"))
    note = json.loads((tmp_path / "out" / "conversion.json").read_text())["notes"][0]
    assert note.startswith("32 of 48 latent channels carry keys and values")
    assert "15 are zero" in note
    assert note in shown.stdout
    same_logits(logits(tmp_path / "out"), logits(source))
    down = weights(tmp_path / "out")["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert (down[:48].abs().amax(1) == 0).sum() == 15 + 1


def test_bfloat16_is_stored_and_the_norm_stays_switched_off(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "wide", *size(4, 8)))
    ok(convert("mla", source, tmp_path / "out", *size(4, 8), "--dtype", "bfloat16"))
    found, wide = weights(tmp_path / "out"), weights(tmp_path / "wide")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert all(torch.equal(found[name], wide[name].bfloat16()) for name in wide), "rounded once"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = logits_of(tmp_path / "out", tokens(24))
    assert (rounded - logits_of(source, tokens(24))).abs().mean() < 0.05 * logits_of(source, tokens(24)).abs().mean()
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["kv_bytes_per_token"] == {"before": 3 * 64 * 4, "after": 3 * 65 * 2, "cache_dtype": "bfloat16"}


def test_a_bfloat16_source_stays_bfloat16(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    save_file({name: tensor.bfloat16() for name, tensor in weights(source).items()}, source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("mla", source, tmp_path / "out", *size(4, 8)))
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["kv_bytes_per_token"] == {"before": 3 * 64 * 2, "after": 3 * 65 * 2, "cache_dtype": "bfloat16"}
    assert all(layer["output_error"] < 1e-9 for layer in record["layers"]), "arithmetic is fp32"


# ---- real checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "rope", "exact"),
    # 8 heads, pairwise equal: 4 heads' components per frequency (32 dims) and 32 dims of values are all there is.
    [(65, 64, True), (33, 64, True), (32, 64, False), (33, 32, True), (33, 30, False), (32, 32, False)],
)
def test_a_real_checkpoint_is_lossless_down_to_its_true_rank(
    rank: int, rope: int, exact: bool, shared: Path, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    source = shared / "checkpoints" / "stories260K-as-mha"
    ok(convert("mla", source, tmp_path / "out", "--kv-lora-rank", rank, "--qk-rope-head-dim", rope))
    difference = float((logits(tmp_path / "out") - logits(source)).abs().max())
    assert (difference < 1e-4) if exact else (difference > 1e-2)


def test_a_model_trained_on_english_is_the_same_function_at_full_size(
    shared: Path, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    source = shared / "checkpoints" / "english-6m-mha"
    ok(convert("mla", source, tmp_path / "out", *size(8, 32, 256)))
    same_logits(logits(tmp_path / "out"), logits(source))


@pytest.mark.parametrize(("rank", "rope"), [(65, 64), (33, 64), (33, 32)])
def test_pca_of_a_real_checkpoint_is_lossless_down_to_its_true_rank(
    rank: int, rope: int, shared: Path, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    source = shared / "checkpoints" / "stories260K-as-mha"
    ok(convert("mla", source, tmp_path / "out", "--kv-lora-rank", rank, "--qk-rope-head-dim", rope, "--method", "pca",
               "--text", shared / "data" / "tinystories.txt", "--calibration-tokens", 2048))  # fmt: skip
    same_logits(logits(tmp_path / "out"), logits(source))


def test_a_bfloat16_export_is_no_worse_than_the_source_in_bfloat16(shared: Path, convert: Convert, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = shared / "checkpoints" / "stories260K-as-mha"
    ok(convert("mla", source, tmp_path / "out", "--kv-lora-rank", 65, "--qk-rope-head-dim", 64, "--dtype", "bfloat16"))
    story = (shared / "data" / "tinystories.txt").read_text()[-8000:]
    ids = AutoTokenizer.from_pretrained(source)(story, return_tensors="pt")["input_ids"][:, :1000].view(4, 250)
    reference = logits_of(source, ids).argmax(-1)

    def agreement(path: Path) -> float:
        return float((logits_of(path, ids, torch.bfloat16).argmax(-1) == reference).double().mean())

    own, ours = agreement(source), agreement(tmp_path / "out")
    assert own > 0.9
    assert ours >= own - 0.005


# ---- what stock transformers makes of it ---------------------------------------------------------------------------

STOCK = (
    WITHOUT_KVFOLD
    + """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
said = []
for path in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    ids = AutoTokenizer.from_pretrained(path)("once upon", return_tensors="pt")
    ways = {"greedy": {}, "beam": {"num_beams": 3}, "static": {"cache_implementation": "static"}}
    said.append([model.generate(**ids, max_new_tokens=12, do_sample=False, **way).tolist() for way in ways.values()])
print(type(model).__name__, said[0] == said[1], said[1][0] == said[1][2], len(said[1][0][0]) > 12)
"""
)


def test_the_stock_class_generates_as_the_source_does_where_kvfold_is_not_installed(
    checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "out", *size(4, 8)))
    done = subprocess.run(
        [sys.executable, "-I", "-c", STOCK, str(source), str(tmp_path / "out")],
        capture_output=True, text=True, cwd="/", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["DeepseekV3ForCausalLM", "True", "True", "True"]


@pytest.mark.parametrize(("rank", "rope"), [(16, 8), (33, 32), (5, 2)])
def test_the_live_cache_is_what_the_config_says(
    rank: int, rope: int, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    ok(convert("mla", checkpoint(), tmp_path / "out", "--kv-lora-rank", rank, "--qk-rope-head-dim", rope))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    spec = AttentionSpec.from_config(model.config)
    assert spec.values_per_token == 3 * (rank + rope)
    for running in (model, load(tmp_path / "out", dtype=torch.float32, when="always").eval()):
        with torch.inference_mode():
            cache = running(tokens(10)).past_key_values
            layers = running(tokens(1), past_key_values=cache).past_key_values.layers
        held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
        assert held == 2 * 11 * spec.values_per_token * 4
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["kv_bytes_per_token"]["after"] == spec.bytes_per_token("float32")


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", WAYS)
def test_two_runs_write_the_same_bytes(method: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path) -> None:
    source = checkpoint()
    for name in "ab":
        ok(convert("mla", source, tmp_path / name, *SMALL, *method_options(method, text)))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")


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


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_accounted_for_once(tied: bool, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(tie_word_embeddings=tied)
    ok(convert("mla", source, tmp_path / "out", *SMALL))
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]
    before, after = weights(source), weights(tmp_path / "out")
    assert sorted([*record["converted"], *record["copied"]]) == sorted(after)
    assert record["cast"] == []
    assert set(record["dropped"]) == set(before) - set(after)
    assert {name.split("self_attn.")[1] for name in record["dropped"]} == {"k_proj.weight", "v_proj.weight"}
    assert set(record["dropped"].values()) == {"factored into kv_a_proj_with_mqa and kv_b_proj"}
    assert {name.split("self_attn.")[1] for name in record["converted"]} >= {"q_proj.weight", "kv_b_proj.weight"}
    assert all(torch.equal(before[name], after[name]) for name in record["copied"])
    assert {name for name in before if "self_attn" not in name} == set(record["copied"]) - {
        name for name in record["copied"] if "self_attn" in name
    }


@pytest.mark.parametrize("method", WAYS)
def test_a_conversion_is_repeated_from_its_record(
    method: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    options = ["--max-shard-size", "30KB", *method_options(method, text)]
    if method == "pca":
        options += ["--calibration-tokens", 1000, "--calibration-context", 50, "--freqfold", 4, "--propagate"]
    ok(convert("mla", checkpoint(), tmp_path / "a", *SMALL, *options))
    ok(convert("run", tmp_path / "a" / "conversion.json", "--set", f"output={tmp_path / 'b'}"))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")
    record = json.loads((tmp_path / "a" / "conversion.json").read_text())
    assert (record["calibration_hash"] is None) == (method in ("svd", "weighted"))
    if method == "pca":
        assert record["calibration"] == {"text": "text.txt", "tokens": 1000}


def test_a_budget_becomes_a_size_that_is_repeated(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("mla", checkpoint(), tmp_path / "a", "--kv-budget", "37.5%"))
    ok(convert("run", tmp_path / "a" / "conversion.json", "--set", f"output={tmp_path / 'b'}"))
    same_but_for_the_run(tmp_path / "a", tmp_path / "b")


def test_evaluating_fills_the_card(checkpoint: Make, convert: Convert, text: Path, tmp_path: Path) -> None:
    (tmp_path / "held-out.txt").write_text("a line of text, and another\n" * 40)
    ok(convert("mla", checkpoint(), tmp_path / "out", *size(4, 8), "--evaluate", tmp_path / "held-out.txt", "-q"))
    source, converted = json.loads((tmp_path / "out" / "conversion.json").read_text())["evaluation"]["models"]
    assert converted["perplexity"] == pytest.approx(source["perplexity"], rel=1e-4)
    assert converted["kl_to_source"] == pytest.approx(0, abs=1e-5)
    assert (converted["kind"], converted["method"], converted["kv_bytes_per_token"]) == ("MLA-33+32", "weighted", 3 * 65 * 4)
    assert "held-out.txt, context 128" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("method", WAYS)
def test_a_dry_run_needs_no_weights(method: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path) -> None:
    source = checkpoint()
    (source / "model.safetensors").unlink()
    plan = json.loads(ok(convert("mla", source, tmp_path / "out", *SMALL, *method_options(method, text), "--dry-run",
                                 "--json")).stdout)  # fmt: skip
    assert (plan["target"], plan["model_type"], plan["latent_channels"]) == ("MLA-16+8", "deepseek_v3", 15)
    assert plan["kv_bytes_per_token_after"] == 3 * 24 * 4
    assert (plan["calibration"] is None) == (method in ("svd", "weighted"))
    assert not list(tmp_path.glob("out*"))


# ---- budgets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "values"),
    # The source caches 3 layers × 64 values × 4 bytes = 768 bytes per token.
    [("12.5%", 8), ("50%", 32), ("100%", 64), ("384", 32), ("0.3KB", 25), ("384B", 32), (" 50 % ", 32)],
)
def test_a_budget_is_kept(budget: str, values: int, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    plan = json.loads(ok(convert("mla", checkpoint(), tmp_path / "o", "--kv-budget", budget, "--dry-run", "--json")).stdout)
    assert plan["kv_lora_rank"] + plan["qk_rope_head_dim"] in (values, values - 1)
    assert plan["kv_bytes_per_token_after"] <= values * 12


def test_a_budget_is_counted_in_the_dtype_that_is_written(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    command = ["mla", checkpoint(), tmp_path / "o", "--dry-run", "--json", "--dtype", "bfloat16", "--kv-budget"]
    for budget in ("25%", "192"):
        plan = json.loads(ok(convert(*command, budget)).stdout)
        assert plan["kv_bytes_per_token_after"] == 192
        assert plan["kv_lora_rank"] + plan["qk_rope_head_dim"] == 32


# ---- interruption --------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys
import convert.execute.weights as execute
from convert.cli import main
from convert.checkpoint.shelf import Shelf
from convert.calibration.stream import LayerStream
place, count = sys.argv[1], int(sys.argv[2])
def dying(function, half=None, kind=""):
    def wrapped(*args, **kwargs):
        global count
        count -= not kind or args[0]._name == kind
        if count == 0:
            if half:
                half(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped
def half_spool(stream, *rest):
    stream._spool.with_name(stream._spool.name + "-unfinished").write_bytes(b"half of it")
if place == "inputs":
    LayerStream.advance = dying(LayerStream.advance, half_spool)
elif place in ("statistics", "layers"):
    kind = {"statistics": "source", "layers": "layer"}[place]
    Shelf.put = dying(
        Shelf.put, lambda shelf, layer, *_: shelf._path(layer).with_suffix(".tmp").write_bytes(b"half"), kind
    )
else:
    execute.write_shard = dying(
        execute.write_shard, lambda path, *_: path.with_name(path.name + ".tmp").write_bytes(b"half of a sha")
    )
main(sys.argv[3:], prog_name="convert")
"""
IN_SEQUENCE = {
    "pca": ["--method", "pca"],
    "propagated": ["--method", "pca", "--propagate"],
    "refitted": ["--method", "weighted"],
    "refined": ["--method", "svd", "--no-refit", "--refine", 2],
    "all": ["--method", "weighted", "--propagate", "--refine", 2],
}
# The survey advances twice and puts three layers on the shelf. Then the result advances twice, and where it has the source
# beside it, that one three times; three converted layers are put on a shelf of their own.
KILLED = [
    ("inputs", 2, "pca"), ("statistics", 3, "pca"), ("shards", 3, "pca"), ("layers", 2, "all"),
]  # fmt: skip
STOPPED = [
    *KILLED, ("inputs", 4, "propagated"), ("layers", 2, "propagated"), ("layers", 1, "refitted"), ("layers", 3, "refined"),
    *(("inputs", count, "refitted") for count in range(3, 8)), ("inputs", 6, "refined"), ("inputs", 5, "all"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "count", "way"), KILLED)
def test_a_killed_run_leaves_nothing_loadable_and_resumes(
    place: str, count: int, way: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source, out = checkpoint(), tmp_path / "out"
    options = [*SMALL, *IN_SEQUENCE[way], "--text", text, "--calibration-tokens", 256, "--max-shard-size", "20KB"]
    command = ["mla", source, out, *options]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, place, str(count), *map(str, command)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    resumed(convert, source, out, options, tmp_path)


@pytest.mark.parametrize(("place", "count", "way"), STOPPED)
def test_an_interrupted_run_says_how_to_go_on(
    place: str, count: int, way: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from convert.execute import weights as execute

    source, out, left = checkpoint(), tmp_path / "out", [count]
    options = [*SMALL, *IN_SEQUENCE[way], "--text", text, "--calibration-tokens", 256, "--max-shard-size", "20KB"]
    where: dict[str, tuple[Any, str]] = {
        "inputs": (LayerStream, "advance"), "statistics": (Shelf, "put"), "shards": (execute, "write_shard"),
        "layers": (Layer, "of"),
    }  # fmt: skip
    owner, name = where[place]
    function = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        result = convert("mla", source, out, *options)
    assert result.exit_code == 130, result.output
    assert "interrupted" in result.stderr
    assert "--resume" in result.stderr
    resumed(convert, source, out, options, tmp_path)


def resumed(convert: Convert, source: Path, out: Path, options: list[Any], tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    assert not out.exists()
    assert not (partial / "checkpoint" / "config.json").exists()
    refused = convert("mla", source, out, *options)
    assert refused.exit_code == 2
    assert "holds an unfinished conversion" in refused.stderr
    different = convert("mla", source, out, "--kv-lora-rank", 12, *options[2:], "--resume")
    assert different.exit_code == 2
    assert "kv_lora_rank: 16 then, 12 now" in different.stderr
    finished = {path: path.stat().st_mtime_ns for path in (partial / "checkpoint").glob("*.safetensors")}
    ok(convert("mla", source, out, *options, "--resume"))
    assert not partial.exists()
    assert all((out / path.name).stat().st_mtime_ns == when for path, when in finished.items()), "written again"
    ok(convert("mla", source, tmp_path / "whole", *options))
    same_but_for_the_run(out, tmp_path / "whole")


def test_a_resumed_survey_does_no_layer_twice(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options, seen = checkpoint(), [*SMALL, "--method", "pca", "--text", text], []
    put, advance, embed = Shelf.put, LayerStream.advance, LayerStream.embed

    def note(what: str, function: Callable[..., Any], stop_at: int | None = None) -> Callable[..., Any]:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((what, *args[:1]))
            if len(seen) == stop_at:
                raise KeyboardInterrupt
            return function(self, *args, **kwargs)

        return noted

    monkeypatch.setattr(Shelf, "put", note("put", put, 5))
    monkeypatch.setattr(LayerStream, "advance", note("advance", advance))
    monkeypatch.setattr(LayerStream, "embed", note("embed", embed))
    assert convert("mla", source, tmp_path / "out", *options).exit_code == 130
    monkeypatch.setattr(Shelf, "put", note("put", put))
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))
    steps: list[tuple[Any, ...]] = [("embed",), ("advance", 0), ("put", 0), ("advance", 1), ("put", 1)]
    steps += [("advance", 1), ("put", 1), ("put", 2)]  # layer 1, whose statistics were not on the shelf yet, begins again
    assert seen == steps


def test_a_survey_of_another_text_is_not_resumed(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    source, options = checkpoint(), [*SMALL, "--method", "pca", "--text", text]
    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "advance", interrupted)
        assert convert("mla", source, tmp_path / "out", *options).exit_code == 130
    original = text.read_text()
    text.write_text(original[::-1])
    changed = convert("mla", source, tmp_path / "out", *options, "--resume")
    assert changed.exit_code == 2
    assert "calibration_hash: sha256:" in changed.stderr
    text.write_text(original)
    for option in (["--propagate"], ["--calibration-context", 64], ["--freqfold", 2], ["--method", "svd"]):
        given = [o for o in options if o not in ("--text", text)] if option[1:] == ["svd"] else options
        assert convert("mla", source, tmp_path / "out", *given, *option, "--resume").exit_code == 2, option
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))


def test_propagation_changes_what_later_layers_see_and_nothing_of_the_first(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source, options = checkpoint(), [*SMALL, "--method", "pca", "--text", text]
    ok(convert("mla", source, tmp_path / "plain", *options))
    ok(convert("mla", source, tmp_path / "through", *options, "--propagate"))
    plain, through = weights(tmp_path / "plain"), weights(tmp_path / "through")
    differing = {name.split(".")[2] for name in plain if not torch.equal(plain[name], through[name])}
    assert differing == {"1", "2"}
    assert (tmp_path / "plain" / "config.json").read_text() == (tmp_path / "through" / "config.json").read_text()


def test_propagation_through_lossless_layers_is_no_propagation(
    checkpoint: Make, convert: Convert, logits: Logits, text: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "out", *size(4, 8), "--method", "pca", "--text", text, "--propagate"))
    same_logits(logits(tmp_path / "out"), logits(source))


def test_a_full_disk_during_the_survey_leaves_the_work_for_resume(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options, opened = checkpoint(), [*SMALL, "--method", "pca", "--text", text], []
    writing = LayerStream._writing

    @contextlib.contextmanager
    def fills_up(self: LayerStream, layer: int) -> Iterator[Callable[[torch.Tensor], None]]:
        with writing(self, layer) as write:

            def full(hidden: torch.Tensor) -> None:
                opened.append(layer)
                if layer == 2:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                write(hidden)

            yield full

    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "_writing", fills_up)
        result = convert("mla", source, tmp_path / "out", *options)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "--resume" in result.stderr
    assert not (tmp_path / "out").exists()
    shelf = tmp_path / "out.partial" / "survey"
    assert [path.name for path in shelf.glob("source-0000*")] == ["source-00000.safetensors"]
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))
    ok(convert("mla", source, tmp_path / "whole", *options))
    same_but_for_the_run(tmp_path / "out", tmp_path / "whole")


def test_a_full_disk_under_the_statistics_leaves_the_work_for_resume(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def fails(path: Path, data: bytes) -> int:
        if path.parent.name == "survey":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    source, options = checkpoint(), [*SMALL, "--method", "pca", "--text", text]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fails)
        result = convert("mla", source, tmp_path / "out", *options)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "--resume" in result.stderr
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))


def test_too_little_space_counts_the_survey(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**6})())
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "svd", *SMALL))
    result = convert("mla", source, tmp_path / "pca", *SMALL, "--method", "pca", "--text", text)
    refused(result, 1, "no space", tmp_path / "pca")


def test_a_survey_under_way_outlives_a_disk_that_is_still_full(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = checkpoint(), [*SMALL, "--method", "pca", "--text", text]

    def full(*rest: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("convert.execute.weights.write_shard", full)
        assert convert("mla", source, tmp_path / "out", *options).exit_code == 1
    found = {file.name for file in (tmp_path / "out.partial" / "survey").iterdir()}
    assert found
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        again = convert("mla", source, tmp_path / "out", *options, "--resume")
    assert again.exit_code == 1
    assert "then use --resume" in again.stderr
    assert {file.name for file in (tmp_path / "out.partial" / "survey").iterdir()} == found
    ok(convert("mla", source, tmp_path / "out", *options, "--resume"))


# ---- bad input -----------------------------------------------------------------------------------------------------


def refused(result: Any, code: int, message: str, out: Path) -> None:
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not list(out.parent.glob(f"{out.name}*")), "something is left"


ARGUMENTS: dict[str, tuple[list[Any], str]] = {
    "rank too large": (["--kv-lora-rank", 35, "--qk-rope-head-dim", 32], "rank 35 exceeds full size"),
    "rank 1": (["--kv-lora-rank", 1, "--qk-rope-head-dim", 8], "a latent of rank 1 holds nothing: deepseek_v3 needs 1 channel"),
    "rank 0": (["--kv-lora-rank", 0, "--qk-rope-head-dim", 8], "a latent of rank 0 holds nothing"),
    "rank -5": (["--kv-lora-rank", -5, "--qk-rope-head-dim", 8], "a latent of rank -5 holds nothing"),
    "rope odd": (["--kv-lora-rank", 16, "--qk-rope-head-dim", 7], "cannot keep 7 rotary dims"),
    "rope 0": (["--kv-lora-rank", 16, "--qk-rope-head-dim", 0], "cannot keep 0 rotary dims"),
    "rope too large": (["--kv-lora-rank", 16, "--qk-rope-head-dim", 34], "it must be even and between 2 and 32"),
    "no size": ([], "give --kv-lora-rank and --qk-rope-head-dim, or --kv-budget"),
    "half a size": (["--kv-lora-rank", 16], "give --kv-lora-rank and --qk-rope-head-dim, or --kv-budget"),
    "other half of a size": (["--qk-rope-head-dim", 8], "give --kv-lora-rank and --qk-rope-head-dim, or --kv-budget"),
    "padding and budget": (["--kv-budget", "50%", "--pad-rank"], "give either --kv-budget or --pad-rank"),
    "size and budget": ([*SMALL, "--kv-budget", "50%"], "give either --kv-budget or"),
    "half a size and budget": (["--kv-lora-rank", 8, "--kv-budget", "50%"], "give either --kv-budget or"),
    "budget too small": (["--kv-budget", "3%"], "a budget of 23 bytes per token is too small for any rank"),
    "budget of nothing": (["--kv-budget", "0%"], "'0%' is no budget"),
    "budget of 0 bytes": (["--kv-budget", "0"], "a budget of 0 bytes per token is too small"),
    "budget above all": (["--kv-budget", "150%"], "'150%' is no budget"),
    "budget nonsense": (["--kv-budget", "a little"], "'a little' is no budget"),
    "budget negative": (["--kv-budget", "-4096"], "'-4096' is no budget"),
    "freqfold with weighted": ([*SMALL, "--freqfold", 2], "method weighted does not fold frequencies"),
    "freqfold with svd": ([*SMALL, "--method", "svd", "--freqfold", 2], "method svd does not fold frequencies"),
    "text with svd": (
        [*SMALL, "--method", "svd", "--text", "TEXT"], "method svd looks at weights only and has no use for --text"
    ),
    "propagate with svd": (
        [*SMALL, "--method", "svd", "--text", "TEXT", "--propagate"], "has no use for --propagate and --text"
    ),
    "propagate and refit with svd": (
        [*SMALL, "--method", "svd", "--text", "TEXT", "--propagate", "--refit"], "has no use for --propagate\nhint"
    ),
    "propagate without text": ([*SMALL, "--propagate"], "--propagate is about calibration text, and there is none"),
    "refit without text": ([*SMALL, "--refit"], "--refit is about calibration text, and there is none"),
    "refine without text": (
        [*SMALL, "--refine", 3, "--calibration-tokens", 9], "--calibration-tokens and --refine are about calibration text"
    ),
    "refine nothing": ([*SMALL, "--text", "TEXT", "--refine", 0], "0 is not in the range x>=1"),
    "pca without text": ([*SMALL, "--method", "pca"], "method pca needs text to calibrate on"),
    "freqfold 3": ([*SMALL, "--method", "pca", "--text", "TEXT", "--freqfold", 3], "cannot fold 4 frequencies by 3"),
    "freqfold 0": ([*SMALL, "--method", "pca", "--text", "TEXT", "--freqfold", 0], "cannot fold 4 frequencies by 0"),
    "freqfold too small": (
        ["--kv-lora-rank", 16, "--qk-rope-head-dim", 2, "--method", "pca", "--text", "TEXT", "--freqfold", 2],
        "(choose 4)",
    ),
    "text and dataset": (
        [*SMALL, "--method", "pca", "--text", "TEXT", "--dataset", "wikitext"],
        "give either a text or a dataset to calibrate on\nhint: --text",
    ),
    "context too long": (
        [*SMALL, "--method", "pca", "--text", "TEXT", "--calibration-context", 129],
        "a calibration context of 129 tokens exceeds the 128 positions of the model",
    ),
    "less than one block": (
        [*SMALL, "--method", "pca", "--text", "TEXT", "--calibration-tokens", 127],
        "127 calibration tokens are less than one block of 128",
    ),
    "missing text": ([*SMALL, "--method", "pca", "--text", "missing.txt"], "does not exist"),
    "unknown method": ([*SMALL, "--method", "magic"], "'magic' is not one of"),
    "float16": ([*SMALL, "--dtype", "float16"], "float16 ends at 65504 (use --dtype bfloat16)"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused_without_weights(
    case: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source, (arguments, message) = checkpoint(num_hidden_layers=1, tie_word_embeddings=True), ARGUMENTS[case]
    if "budget" in case:
        source = _three_layers(source)
    (source / "model.safetensors").unlink()
    arguments = [text if argument == "TEXT" else argument for argument in arguments]
    refused(convert("mla", source, tmp_path / "out", *arguments), 2, message, tmp_path / "out")


def _three_layers(source: Path) -> Path:
    raw = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 3}
    (source / "config.json").write_text(json.dumps(raw))
    return source


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "query biases": ("qwen2", {}, "qwen2 does not have Llama's decoder blocks"),
    "biases": ("llama", {"attention_bias": True}, "queries have biases"),
    "window": ("mistral", {"sliding_window": 64}, "set max_position_embeddings to 64"),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic' has no"),
    "float16 source": ("llama", {"dtype": "float16"}, "float16 ends at 65504 (use --dtype bfloat16)"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_sources_that_no_output_class_carries_are_refused(
    case: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    model_type, changes, message = CONFIGS[case]
    source = checkpoint(model_type, num_hidden_layers=1, **{k: v for k, v in changes.items() if k != "dtype"})
    if "dtype" in changes:
        raw = json.loads((source / "config.json").read_text()) | changes
        (source / "config.json").write_text(json.dumps(raw))
    result = convert("mla", source, tmp_path / "out", *SMALL)
    refused(result, 2, message, tmp_path / "out")
    assert "no output class carries MLA of" in result.stderr
    assert len(result.stderr.splitlines()) <= 2
    # Whether any latent fits comes before its size.
    refused(convert("mla", source, tmp_path / "out", "--kv-lora-rank", 9999, "--qk-rope-head-dim", 3), 2, message,
            tmp_path / "out")  # fmt: skip


def test_a_float16_source_is_converted_into_another_dtype(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    tensors = {name: tensor.half() for name, tensor in weights(source).items()}
    save_file(tensors, source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | {"dtype": "float16"}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("mla", source, tmp_path / "out", *size(4, 8), "--dtype", "float32"))
    same_logits(logits_of(tmp_path / "out", tokens(24)), logits_of(source, tokens(24)))


TEXTS: dict[str, tuple[bytes, str]] = {
    "short": (b"too short a text", "has 16 tokens, fewer than one block of 128"),
    "empty": (b" \n", "is empty"),
    "no bytes": (b"", "is empty"),
    "not UTF-8": ("Stra\xdfe ".encode("latin-1") * 100, "is not UTF-8 text"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_cannot_be_used(case: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    content, message = TEXTS[case]
    (tmp_path / "bad.txt").write_bytes(content)
    result = convert("mla", checkpoint(), tmp_path / "out", *SMALL, "--method", "pca", "--text", tmp_path / "bad.txt")
    refused(result, 1, message, tmp_path / "out")


@pytest.mark.parametrize(
    "content", ["a" * 2000, "the same again. " * 200, "ab" * 64], ids=["constant", "repeated", "one block"]
)
@pytest.mark.parametrize("propagate", [False, True])
def test_poor_texts_give_finite_models(
    propagate: bool, content: str, checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    source = checkpoint()
    (tmp_path / "poor.txt").write_text(content)
    options = ["--method", "pca", "--text", tmp_path / "poor.txt", *(["--propagate"] if propagate else [])]
    ok(convert("mla", source, tmp_path / "out", *SMALL, *options))
    assert torch.isfinite(logits(tmp_path / "out")).all()
    ok(convert("mla", source, tmp_path / "full", *size(4, 8), *options))
    same_logits(logits(tmp_path / "full"), logits(source), 1e-3)


def damage(source: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")
    return source


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize(
    "name",
    ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight",
     "model.norm.weight", "model.embed_tokens.weight"],
)  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(
    value: float, name: str, method: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source = damage(checkpoint(), lambda tensors: tensors[name].fill_(value))
    result = convert("mla", source, tmp_path / "out", *SMALL, *method_options(method, text))
    refused(result, 1, f"tensor {name} holds NaN or infinite values", tmp_path / "out")


@pytest.mark.parametrize("scale", [1e38, 1e19], ids=["the values", "their squares, so that the norm gives zeros"])
def test_activations_that_overflow_name_the_layer(
    scale: float, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].mul_(scale**0.5)
        tensors["model.layers.0.mlp.down_proj.weight"].mul_(scale / scale**0.5 * 1e3)

    result = convert("mla", damage(checkpoint(), enlarge), tmp_path / "out", *SMALL, "--method", "pca", "--text", text)
    refused(result, 1, "layer 1", tmp_path / "out")
    if scale == 1e38:
        assert "the input of layer 1's attention is not finite on the calibration text" in result.stderr


def test_weights_that_overflow_when_they_are_written_are_named(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    source = damage(checkpoint(), lambda tensors: tensors[name].mul_(3.3e38 / tensors[name].abs().max()))
    result = convert("mla", source, tmp_path / "out", *SMALL)  # queries are scaled by √(16 / 8)
    refused(result, 1, f"tensor {name}", tmp_path / "out")


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_large_and_small_weights_have_errors_that_are_numbers(
    scale: float, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    def rescale(tensors: dict[str, torch.Tensor]) -> None:
        for name, factor in (("q", 1 / scale), ("k", scale), ("v", scale), ("o", 1 / scale)):
            tensors[f"model.layers.1.self_attn.{name}_proj.weight"].mul_(factor)

    source = checkpoint()
    ok(convert("mla", source, tmp_path / "plain", *SMALL))
    ok(convert("mla", damage(source, rescale), tmp_path / "out", *SMALL))
    plain, found = (
        json.loads((tmp_path / name / "conversion.json").read_text(), parse_constant=pytest.fail)["layers"][1]
        for name in ("plain", "out")
    )
    assert found["output_error"] == pytest.approx(plain["output_error"], rel=0.3)
    assert found["score_error"] == pytest.approx(plain["score_error"], rel=0.3)


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("method", WAYS)
def test_a_layer_of_zeros_is_no_obstacle(
    method: str, name: str, checkpoint: Make, convert: Convert, logits: Logits, text: Path, tmp_path: Path
) -> None:
    source = damage(checkpoint(), lambda tensors: tensors[f"model.layers.1.self_attn.{name}.weight"].zero_())
    ok(convert("mla", source, tmp_path / "full", *size(4, 8), *method_options(method, text)))
    same_logits(logits(tmp_path / "full"), logits(source), tolerance(method))
    ok(convert("mla", source, tmp_path / "small", *SMALL, *method_options(method, text)))
    assert torch.isfinite(logits(tmp_path / "small")).all()


def test_an_export_evaluated_in_float16_is_an_error(checkpoint: Make, convert: Convert, text: Path, tmp_path: Path) -> None:
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "out", *size(4, 8), "--dtype", "bfloat16"))
    ok(convert("eval", source, tmp_path / "out", "--text", text, "--max-tokens", 300, "-q"))
    result = convert("eval", source, tmp_path / "out", "--text", text, "--max-tokens", 300, "--dtype", "float16", "-q")
    assert result.exit_code == 1, result.output
    assert "finite" in result.stderr
    assert "Traceback" not in result.stderr


def test_frequencies_that_old_checkpoints_keep_are_left_out(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    damage(source, lambda tensors: tensors.update({name: torch.ones(4)}))
    ok(convert("mla", source, tmp_path / "mla", *SMALL))
    ok(convert("mqa", source, tmp_path / "mqa"))
    assert name not in weights(tmp_path / "mla")
    assert name in weights(tmp_path / "mqa")
    dropped = json.loads((tmp_path / "mla" / "conversion.json").read_text())["tensors"]["dropped"]
    assert dropped[name] == "RoPE's frequencies are in config.json"


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_survey_of_half_a_checkpoint_names_what_is_missing(
    name: str, checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source = damage(checkpoint(tie_word_embeddings=False), lambda tensors: tensors.pop(name))
    result = convert("mla", source, tmp_path / "out", *SMALL, "--method", "pca", "--text", text)
    refused(result, 1, f"the checkpoint lacks tensor {name}", tmp_path / "out")


def test_evaluating_on_the_calibration_text_is_warned_of(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    options = [*SMALL, "--method", "pca", "--text", text]
    result = ok(convert("mla", checkpoint(), tmp_path / "out", *options, "--evaluate", text))
    assert re.search(r"warning: .* shares (9\d|100)% of its runs with the calibration text", result.stderr)
    assert "of this one, which flatters these figures" in (tmp_path / "out" / "README.md").read_text()
    shown = ok(convert("eval", tmp_path / "source", tmp_path / "out", "--text", text)).stdout
    assert "Warning: out was calibrated on text that holds" in shown


def test_a_fold_is_called_inexact_and_a_large_result_large(
    checkpoint: Make, convert: Convert, text: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    sizes = ["--kv-lora-rank", 33, "--qk-rope-head-dim", 32, "--dry-run", "--json"]
    folded = ok(convert("mla", source, tmp_path / "out", *sizes, "--method", "pca", "--text", text, "--freqfold", 2))
    notes = json.loads(folded.stdout)["notes"]
    assert "inexact at any rank: 2 neighbouring frequencies are taken for one" in notes
    assert "the cache is not smaller than the source's" in notes
    (note,) = json.loads(ok(convert("mla", source, tmp_path / "out", *SMALL, "--method", "svd", "--dry-run", "--json")).stdout)[
        "notes"
    ]
    assert "latent channels carry keys and values" in note
    _, note = json.loads(ok(convert("mla", source, tmp_path / "out", *SMALL, "--dry-run", "--json")).stdout)["notes"]
    assert note == "no calibration text: weighted uses weights and norm gains alone, and loses more than with --text"


def test_a_rank_that_the_kernel_does_not_serve_is_remarked(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    for rank, remarks in ((16, 0), (20, 1)):
        command = ["mla", checkpoint(), tmp_path / "out", "--kv-lora-rank", rank, "--qk-rope-head-dim", 8, "--dry-run"]
        assert ok(convert(*command)).stdout.count(f"rank {rank} is no multiple of 16") == remarks
