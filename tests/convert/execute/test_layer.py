"""Converted layers compute what the source's did, in whole models: every family, RoPE and shape."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL, WAYS, full_size, logits_of, method_options, same_logits, tokens, tolerance
from rows import rows
from safetensors.torch import save_file
from tiny import SWITCHES, save_tokenizer
from tiny_mla import mla_model
from written import damage, edit, left_nothing, ok, weights

from attention import load
from attention.spec import AttentionSpec
from convert import gqa, mla
from convert.demo.corpus import VALIDATION, held_out_text
from convert.demo.showcase import MODEL
from convert.families import FAMILIES, family_of
from eval import evaluate
from eval.inputs.source import Source

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]

WITH_KV_HEADS = [name for name, family in FAMILIES.items() if family.has_heads]

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


def spec_of(path: Path) -> AttentionSpec:
    return AttentionSpec.from_config(Source.parse(str(path)).config)


# ---- fewer KV heads --------------------------------------------------------------------------------------------------


def test_merged_heads_are_rounded_once(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "half", "--groups", 4, "--dtype", "bfloat16"))
    ok(convert("gqa", tmp_path / "half", tmp_path / "wide", "--groups", 2, "--dtype", "float32", "--method", "mean"))
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = weights(tmp_path / "half")[name].float().unflatten(0, (2, 2, 8))
    torch.testing.assert_close(weights(tmp_path / "wide")[name], rows.mean(1).flatten(0, 1), rtol=1e-6, atol=0)


def test_real_checkpoint_with_pairwise_equal_heads(shared: Path, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = shared / "checkpoints" / "stories260K-as-mha"
    ok(convert("gqa", source, tmp_path / "four", "--groups", 4, "--method", "mean"))
    torch.testing.assert_close(logits(tmp_path / "four"), logits(source), rtol=1e-5, atol=1e-5)
    original = weights(shared / "checkpoints" / "stories260K")
    four = weights(tmp_path / "four")
    assert all(torch.equal(four[name], original[name]) for name in original)
    for groups in (2, 1):
        ok(convert("gqa", source, tmp_path / str(groups), "--groups", groups))
        assert (logits(tmp_path / str(groups)) - logits(source)).abs().max() > 1


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def parts_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors but those of attentions, by role."""
    config = json.loads((path / "config.json").read_text())
    family = family_of(config["model_type"], config.get("text_config", {}).get("model_type"))
    found: dict[str, torch.Tensor] = {}
    family = family.of(Source.parse(str(path)).config)
    attention = {name for layer in range(2) for name in family.shapes(layer)}
    for name, tensor in weights(path).items():
        if name not in attention:
            place = family.names.place(name)
            assert place is not None, name
            found |= place.split(tensor)
    return found


@pytest.mark.parametrize("model_type", rows(WITH_KV_HEADS))
def test_every_family_is_calibrated_as_published_and_equal_heads_stay_lossless(
    model_type: str, checkpoint: Make, convert: Convert, logits: Logits, letters: Path, tmp_path: Path
) -> None:
    """The text has no token of most of the vocabulary, and not the one for padding."""
    switches = dict.fromkeys(SWITCHES, True)
    source = checkpoint(model_type, as_published=True, duplicated=2, num_hidden_layers=2, **switches)
    few = ["--text", letters, "--calibration-tokens", 64, "--calibration-context", 16, "--dtype", "float32"]
    ok(convert("gqa", source, tmp_path / "out", "--groups", spec_of(source).num_kv_heads // 2, *few))
    assert distance(logits(tmp_path / "out"), logits(source)) < 1e-3
    before, after = parts_of(source), parts_of(tmp_path / "out")
    assert before.keys() - after.keys() <= {"padding_positions.weight"}
    assert all(torch.equal(before[role].float(), after[role]) for role in after)


@pytest.mark.parametrize(
    "model_type", rows(WITH_KV_HEADS, ["llama", "phi3", "falcon", "bloom", "gpt2", "qwen3_moe", "stablelm", "gpt_neo"])
)
def test_a_single_head_is_finite_and_refined(
    model_type: str, checkpoint: Make, convert: Convert, logits: Logits, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint(model_type, num_hidden_layers=2, **dict.fromkeys(SWITCHES, True))
    ok(convert("mqa", source, tmp_path / "one", *on, "--refine", 1))
    assert torch.isfinite(logits(tmp_path / "one")).all()
    assert (logits(tmp_path / "one") - logits(source)).abs().max() > 1e-3
    before, after = parts_of(source), parts_of(tmp_path / "one")
    assert before.keys() - after.keys() <= {"padding_positions.weight"}
    assert all(torch.equal(before[role], after[role]) for role in after)


@pytest.mark.parametrize("way", [[], ["--no-refit"], ["--refine", 2]], ids=str)
def test_as_many_groups_as_heads_copies_every_bit_with_text_too(
    way: list[Any], checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "out", "--groups", 4, "--force", *on, *way))
    before, after = weights(source), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["notes"][1] == "the calibration text is not used"


# ---- a latent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", WAYS)
def test_less_than_full_size_loses(
    method: str, checkpoint: Make, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    lost = []
    for rank, rope in ((8, 8), (24, 24), (33, 32)):
        out = tmp_path / f"{rank}"
        ok(convert("mla", source, out, "--kv-lora-rank", rank, "--qk-rope-head-dim", rope, *method_options(method, words)))
        lost.append(float((logits(out) - logits(source)).abs().mean()))
    assert lost[0] > lost[1] > lost[2]
    assert lost[1] > 1e-2
    assert lost[2] < 1e-4


# Every method is exact on Llama; on everything else, one that reads text and one that does not.
TWO_WAYS = ["svd", "weighted with text"]


def with_text_once(every: Iterable[str], chosen: str) -> list[Any]:
    """Both ways over all rows, of which `make test` leaves out those with text but the chosen one."""
    every = list(every)
    return rows(product(TWO_WAYS, every), [("svd", row) for row in every] + [(TWO_WAYS[1], chosen)])


def test_dims_without_rope_are_no_rotary_dims(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    source = checkpoint("phi3", rope_parameters=rope)
    message = "of each key's 8 dims only 6 have RoPE, which makes 24"
    given = convert("mla", source, tmp_path / "out", "--kv-lora-rank", 33, "--qk-rope-head-dim", 26)
    left_nothing(given, 2, message, tmp_path / "out")
    ok(convert("mla", source, tmp_path / "whole", "--kv-budget", "100%"))
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["qk_rope_head_dim"] <= 24


BIASED: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {"attention_bias": True},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "smollm3": {"attention_bias": True, "no_rope_layers": [1, 0, 1], "hidden_size": 96},
}


@pytest.mark.parametrize(
    ("method", "model_type"),
    rows(product(TWO_WAYS, BIASED), [("svd", "llama"), ("svd", "seed_oss"), ("svd", "smollm3"), (TWO_WAYS[1], "qwen2")]),
)
def test_query_biases_are_carried(
    method: str, model_type: str, checkpoint: Make, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    """Through the latent of queries: in stock transformers, decoded over the latent, and as a source of a smaller latent."""
    source = checkpoint(model_type, **BIASED[model_type])
    full = ["--kv-lora-rank", 65, "--qk-rope-head-dim", 32] if model_type == "smollm3" else full_size(4, 8)
    result = convert("mla", source, tmp_path / "out", *full, *method_options(method, words))
    ok(result)
    width = BIASED[model_type].get("hidden_size", 64)
    assert f"query biases go through q_a_proj, an identity with a constant: {width} × {width + 16} more" in result.stdout
    same_logits(logits(tmp_path / "out"), logits(source), tolerance(method))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["q_lora_rank"]) == ("deepseek_v3", width + 16)
    biases = {name for name in weights(source) if name.endswith("q_proj.bias")}
    carried = {name.replace("q_proj.bias", "q_b_proj.weight") for name in biases}
    found = weights(tmp_path / "out")
    assert carried <= found.keys()
    assert len(biases) == 3
    assert all(bool(found[name][:, width + 16 - 5].any()) for name in carried if "layers.1" not in name)
    ok(convert("mla", tmp_path / "out", tmp_path / "less", *SMALL, *method_options(method, words)))
    ids = tokens(9)
    model = load(tmp_path / "less", when="always")
    with torch.inference_mode():
        same_logits(model(ids).logits, logits_of(tmp_path / "less", ids))


@pytest.mark.parametrize(
    ("layers", "method"), rows(product(([1, 0, 1], [0, 1, 0]), WAYS), [([1, 0, 1], way) for way in WAYS] + [([0, 1, 0], "svd")])
)
def test_layers_without_positions_are_carried(
    layers: list[int], method: str, checkpoint: Make, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    """All of their keys go into the latent, which is full at min(E, 2 G D); the rope key is zero there."""
    source = checkpoint("smollm3", no_rope_layers=layers, hidden_size=96)
    full = ["--kv-lora-rank", 65, "--qk-rope-head-dim", 32, *method_options(method, words)]
    ok(convert("mla", source, tmp_path / "out", *full))
    same_logits(logits(tmp_path / "out"), logits(source), tolerance(method))
    refused = convert("mla", source, tmp_path / "more", "--kv-lora-rank", 66, "--qk-rope-head-dim", 32, "--method", "svd")
    assert "use --kv-lora-rank 65" in refused.stderr
    ok(
        convert(
            "mla", source, tmp_path / "less", "--kv-lora-rank", 33, "--qk-rope-head-dim", 32, *method_options(method, words)
        )
    )
    assert (logits(tmp_path / "less") - logits(source)).abs().max() > 1e-3
    kept = weights(tmp_path / "out")
    for layer, turns in enumerate(layers):
        key = kept[f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"][-32:]
        assert bool(key.any()) == bool(turns)


@pytest.mark.parametrize(("method", "kind"), with_text_once(ROPES, "longrope"))
def test_every_scaling_of_rope_is_carried(
    method: str, kind: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = checkpoint(rope_parameters={"rope_theta": 10000.0, "rope_type": kind, **ROPES[kind]})
    ok(convert("mla", source, tmp_path / "out", *full_size(4, 8), *method_options(method, words)))
    for length in (12, 100):  # before and beyond original_max_position_embeddings
        same_logits(logits_of(tmp_path / "out", tokens(length)), logits_of(source, tokens(length)), tolerance(method))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert written["rope_type"] == "longrope", "four components of each frequency are no plain stride"


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "MHA": (8, {}),
    "MQA": (1, {}),
    "GQA": (2, {"num_attention_heads": 16}),
    "a tied head": (4, {"tie_word_embeddings": True}),
    "heads wider than the model": (8, {"head_dim": 16}),
    "narrow heads": (4, {"head_dim": 4}),
    "one wide head": (1, {"head_dim": 80}),
    "one layer": (4, {"num_hidden_layers": 1}),
}


@pytest.mark.parametrize(("method", "shape"), with_text_once(SHAPES, "GQA"))
def test_every_shape_of_attention_is_carried(
    method: str, shape: str, checkpoint: Make, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    kv_heads, changes = SHAPES[shape]
    source = checkpoint(num_key_value_heads=kv_heads, **changes)
    ok(
        convert(
            "mla", source, tmp_path / "out", *full_size(kv_heads, changes.get("head_dim", 8)), *method_options(method, words)
        )
    )
    same_logits(logits(tmp_path / "out"), logits(source), tolerance(method))
    assert ("lm_head.weight" in weights(tmp_path / "out")) == ("tie_word_embeddings" not in changes)


def test_a_plain_stride_is_written_as_a_list(checkpoint: Make, convert: Convert, words: Path, tmp_path: Path) -> None:
    ok(convert("mla", checkpoint(), tmp_path / "out", "--kv-lora-rank", 16, "--qk-rope-head-dim", 4, "--method", "pca",
               "--text", words))  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["rope_theta"], rope["short_factor"]) == ("longrope", 1.0, pytest.approx([1.0, 100.0]))
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["rotary_frequencies"] == [0, 2]
    assert provenance["recipe"]["mla"]["freqfold"] == 2


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
    checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "wide", *full_size(4, 8)))
    ok(convert("mla", source, tmp_path / "out", *full_size(4, 8), "--dtype", "bfloat16"))
    found, wide = weights(tmp_path / "out"), weights(tmp_path / "wide")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert all(torch.equal(found[name], wide[name].bfloat16()) for name in wide), "rounded once"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    rounded = logits_of(tmp_path / "out", tokens(24))
    assert (rounded - logits_of(source, tokens(24))).abs().mean() < 0.05 * logits_of(source, tokens(24)).abs().mean()
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["kv_bytes_per_token"] == {"before": 3 * 64 * 4, "after": 3 * 65 * 2, "cache_dtype": "bfloat16"}


def test_a_bfloat16_source_stays_bfloat16(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    save_file({name: tensor.bfloat16() for name, tensor in weights(source).items()}, source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(raw))
    ok(convert("mla", source, tmp_path / "out", *full_size(4, 8)))
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["kv_bytes_per_token"] == {"before": 3 * 64 * 2, "after": 3 * 65 * 2, "cache_dtype": "bfloat16"}


def with_gains(tensors: dict[str, torch.Tensor], gain: float) -> None:
    """The same function, whose attention has inputs so many times as large."""
    for name, tensor in tensors.items():
        if name.endswith("input_layernorm.weight"):
            tensor.mul_(gain)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor.div_(gain)


@pytest.mark.parametrize(("model_type", "gain"), [("llama", 1), ("llama", 0.01), ("qwen2", 1), ("qwen2", 0.01), ("qwen2", 64)])
def test_float16_runs_in_the_stock_class(
    model_type: str, gain: float, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = damage(checkpoint(model_type), lambda tensors: with_gains(tensors, gain))
    save_file({name: tensor.half() for name, tensor in weights(source).items()}, source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | {"dtype": "float16"}
    (source / "config.json").write_text(json.dumps(raw))
    expected = logits_of(source, tokens(24))
    for name, more in (("as it is", ()), ("wide", ("--dtype", "float32")), ("bfloat16", ("--dtype", "bfloat16"))):
        ok(convert("mla", source, tmp_path / name, *full_size(4, 8), *more))
        half = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float16).eval()
        with torch.inference_mode():
            found = half(tokens(24)).logits.float()
        rounding = 0.05 if name == "bfloat16" else 0.005
        assert float((found - expected).abs().mean()) < rounding * float(expected.abs().mean()), name
    same_logits(logits_of(tmp_path / "wide", tokens(24)), expected)


@pytest.mark.parametrize(
    ("method", "name"), rows(product(WAYS, ("k_proj", "v_proj")), [(way, "k_proj") for way in WAYS] + [("weighted", "v_proj")])
)
def test_a_layer_of_zeros_is_no_obstacle(
    method: str, name: str, checkpoint: Make, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    source = damage(checkpoint(), lambda tensors: tensors[f"model.layers.1.self_attn.{name}.weight"].zero_())
    ok(convert("mla", source, tmp_path / "full", *full_size(4, 8), *method_options(method, words)))
    same_logits(logits(tmp_path / "full"), logits(source), tolerance(method))
    ok(convert("mla", source, tmp_path / "small", *SMALL, *method_options(method, words)))
    assert torch.isfinite(logits(tmp_path / "small")).all()


POOR = {"constant": "a" * 2000, "repeated": "the same again. " * 200, "one block": "ab" * 64}


@pytest.mark.parametrize(
    ("refit", "content"), rows(product([False, True], POOR), [(True, "constant"), (False, "repeated"), (True, "one block")])
)
def test_poor_texts_give_finite_models(
    refit: bool, content: str, checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    source = checkpoint()
    (tmp_path / "poor.txt").write_text(POOR[content])
    options = ["--method", "pca", "--text", tmp_path / "poor.txt", *(["--refit"] if refit else [])]
    ok(convert("mla", source, tmp_path / "out", *SMALL, *options))
    assert torch.isfinite(logits(tmp_path / "out")).all()
    ok(convert("mla", source, tmp_path / "full", *full_size(4, 8), *options))
    same_logits(logits(tmp_path / "full"), logits(source), 1e-3)


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
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["kv_bytes_per_token"]["after"] == spec.bytes_per_token("float32")


def test_figures_that_overflow_in_float16_are_an_error(checkpoint: Make, convert: Convert, words: Path, tmp_path: Path) -> None:
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "out", *full_size(4, 8), "--dtype", "bfloat16"))
    evaluated = ("eval", source, tmp_path / "out", "--text", words, "--max-tokens", 300, "--dtype", "float16", "-q")
    ok(convert(*evaluated))
    damage(tmp_path / "out", lambda found: found["model.norm.weight"].fill_(2.0**17))
    result = convert(*evaluated)
    assert result.exit_code == 1, result.output
    assert "finite" in result.stderr
    assert "Traceback" not in result.stderr


# ---- real checkpoints ------------------------------------------------------------------------------------------------


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
    ok(convert("mla", source, tmp_path / "out", *full_size(8, 32, 256)))
    same_logits(logits(tmp_path / "out"), logits(source))


@pytest.mark.parametrize(("rank", "rope"), rows([(65, 64), (33, 64), (33, 32)], [(33, 32)]))
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


# ---- trained weights, in every clone ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def code() -> list[str]:
    """Python's own sources, which the bundled model knows: what it was validated on, and a module held out of its training."""
    return [held_out_text(VALIDATION)[:12000], held_out_text(("statistics",))[8000:12000]]


def paired(path: Path) -> Path:
    """The bundled checkpoint in fp32, with each second KV head equal to the one before: trained weights of a known rank."""
    shutil.copytree(MODEL, path)
    tensors = {name: tensor.float() for name, tensor in weights(MODEL).items()}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = tensor.unflatten(0, (4, 2, -1))
            tensors[name] = heads[:, :1].expand_as(heads).reshape(tensor.shape).contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return edit(path, dtype="float32")


def test_bundled_heads_that_are_pairwise_equal_merge_without_loss(convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = paired(tmp_path / "source")
    ok(convert("gqa", source, tmp_path / "four", "--groups", 4))
    same_logits(logits(tmp_path / "four"), logits(source), 1e-5)
    ok(convert("gqa", source, tmp_path / "two", "--groups", 2))
    assert (logits(tmp_path / "two") - logits(source)).abs().max() > 1


@pytest.mark.parametrize(("rank", "rope", "exact"), [(129, 128, True), (129, 126, False), (97, 128, False)])
def test_the_bundled_model_is_lossless_down_to_its_true_rank(
    rank: int, rope: int, exact: bool, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    """4 heads of 32 dims differ: 128 rotary dims and 128 of values are all there is."""
    source = paired(tmp_path / "source")
    ok(convert("mla", source, tmp_path / "out", "--kv-lora-rank", rank, "--qk-rope-head-dim", rope))
    difference = float((logits(tmp_path / "out") - logits(source)).abs().max())
    assert (difference < 1e-4) if exact else (difference > 1e-2)


def test_the_bundled_model_is_the_same_function_at_full_size(convert: Convert, logits: Logits, tmp_path: Path) -> None:
    ok(convert("mla", MODEL, tmp_path / "out", *full_size(8, 32, 256), "--dtype", "float32"))
    same_logits(logits(tmp_path / "out"), logits(MODEL))


def test_a_bfloat16_export_of_the_bundled_model_is_no_worse_than_itself(
    convert: Convert, code: list[str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    ok(convert("mla", MODEL, tmp_path / "out", *full_size(8, 32, 256)))
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {torch.bfloat16}
    ids = AutoTokenizer.from_pretrained(MODEL)(code[1], return_tensors="pt")["input_ids"][:, :1200].view(4, 300)
    reference = logits_of(MODEL, ids).argmax(-1)
    own, ours = (
        float((logits_of(path, ids, torch.bfloat16).argmax(-1) == reference).double().mean())
        for path in (MODEL, tmp_path / "out")
    )
    assert own > 0.9
    assert ours >= own - 0.005


def losses(paths: list[Path], text: str) -> dict[str, float]:
    """Nats that each loses against the bundled model."""
    found = evaluate([MODEL, *paths], text=[text], context=256, device="cpu")
    return {entry["name"]: entry["loss_nats"] for entry in found["models"]}


def test_heads_of_the_bundled_model_are_aligned_better_with_text(code: list[str], tmp_path: Path) -> None:
    """That `aligned` beats `mean`, and `weighted` `pca`, the test of the demo holds."""
    made = [
        gqa(MODEL, tmp_path / "aligned", groups=4),
        gqa(MODEL, tmp_path / "with text", groups=4, text=[code[0]], calibration_context=256, device="cpu", refit=False),
    ]
    lost = losses([done.output for done in made], code[1])
    assert 0 < lost["with text"] < lost["aligned"]


@pytest.mark.slow  # tiny models show the same at their true rank
def test_a_small_latent_by_way_of_a_large_one_loses_hardly_more(code: list[str], tmp_path: Path) -> None:
    size: dict[str, Any] = {"kv_lora_rank": 96, "qk_rope_head_dim": 32}
    rank, rope = full_size(8, 32, 256)[1::2]
    large = mla(MODEL, tmp_path / "large", kv_lora_rank=rank, qk_rope_head_dim=rope, dtype="float32")
    direct = mla(MODEL, tmp_path / "direct", **size, dtype="float32")
    through = mla(large.output, tmp_path / "through", **size)
    lost = losses([large.output, direct.output, through.output], code[1])
    assert lost["large"] == pytest.approx(0, abs=1e-5)
    assert 0 < lost["through"] < 1.1 * lost["direct"]


# ---- a latent of a latent --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(shelf: Make, convert: Convert, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 4 KV heads, of which two differ, as MLA at full size: it computes the same. Nothing changes it."""
    out = tmp_path_factory.mktemp("latent") / "full"
    ok(convert("mla", shelf(duplicated=2), out, *full_size(4, 8)))
    return out


def test_a_latent_of_the_same_size_is_copied_bit_for_bit(full: Path, convert: Convert, words: Path, tmp_path: Path) -> None:
    said = ok(convert("mla", full, tmp_path / "same", *full_size(4, 8), "--text", words, "--force")).stdout
    assert "MLA-33+32 is what the source has: every tensor is copied bit for bit, unchanged" in said
    before, after = weights(full), weights(tmp_path / "same")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((full / "config.json").read_text()) == json.loads((tmp_path / "same" / "config.json").read_text())
    provenance = json.loads((tmp_path / "same" / "conversion.json").read_text())
    assert (provenance["method"], provenance["layers"], provenance["calibration_hash"]) == (None, [], None)
    assert provenance["tensors"] == {"converted": [], "cast": [], "copied": sorted(before), "dropped": {}}


@pytest.mark.slow
@pytest.mark.parametrize("method", [way for way in WAYS if way != "pca"])
def test_a_latent_of_a_latent_is_lossless_down_to_its_true_rank(
    method: str, full: Path, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    """Two KV heads differ: 16 rotary dims and 16 of values are all there is. (`pca` keeps as many of each band.)"""
    distance = {}
    for rank, rope in ((17, 16), (17, 14), (13, 16), (9, 4)):
        out = tmp_path / f"{rank}+{rope}"
        ok(convert("mla", full, out, "--kv-lora-rank", rank, "--qk-rope-head-dim", rope, *method_options(method, words)))
        distance[rank, rope] = float((logits(out) - logits(full)).abs().max())
    same_logits(logits(tmp_path / "17+16"), logits(full), tolerance(method))
    assert distance[17, 14] > 1e-2
    assert distance[13, 16] > 1e-2
    assert distance[9, 4] > max(distance[17, 14], distance[13, 16])


@pytest.mark.parametrize("method", WAYS)
def test_channels_of_zeros_can_be_taken_out_again(
    method: str, checkpoint: Make, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    ok(convert("mla", source, tmp_path / "padded", "--kv-lora-rank", 48, "--qk-rope-head-dim", 32, "--pad-rank"))
    ok(convert("mla", tmp_path / "padded", tmp_path / "out", *full_size(4, 8), *method_options(method, words)))
    same_logits(logits(tmp_path / "out"), logits(source), tolerance(method))


def test_what_does_not_rotate_any_more_goes_into_the_latent(
    full: Path, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    """With room for it, a smaller rotary key loses the rotation of what it gives up, and no more than a smaller latent does."""
    with_room = ["--kv-lora-rank", 57, "--qk-rope-head-dim", 8]
    refused = convert("mla", full, tmp_path / "out", "--kv-lora-rank", 58, "--qk-rope-head-dim", 8)
    assert "rank 58 exceeds full size" in refused.stderr
    ok(convert("mla", full, tmp_path / "out", *with_room))
    ok(convert("mla", full, tmp_path / "tight", "--kv-lora-rank", 17, "--qk-rope-head-dim", 8))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]) == (40, 8, 8)
    lost = [float((logits(tmp_path / name) - logits(full)).abs().mean()) for name in ("out", "tight")]
    assert 1e-3 < lost[0] < lost[1]


def test_the_stock_class_loads_a_latent_of_a_latent_whole(full: Path, convert: Convert, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ok(convert("mla", full, tmp_path / "out", "--kv-lora-rank", 12, "--qk-rope-head-dim", 6, "--dtype", "bfloat16"))
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    layer = model(tokens(10)).past_key_values.layers[0]
    assert (layer.keys.shape[-1], layer.values.shape[-1]) in ((12, 6), (6, 12))


def test_a_latent_is_inspected_planned_and_evaluated(
    full: Path, shelf: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    facts = json.loads(ok(convert("inspect", full, "--json")).stdout)
    assert (facts["attention"], facts["kv_heads"], facts["kv_lora_rank"]) == ("MLA-33+32", None, 33)
    assert facts["kv_bytes_per_token"] == 3 * 65 * 4
    assert facts["groups_possible"] == []
    assert facts["output_classes"]["gqa"].startswith("none (MLA-33+32 has a latent and no KV heads to merge")
    assert facts["output_classes"]["mla"] == "deepseek_v3, loads in transformers"
    rows = json.loads(ok(convert("plan", full, "--json")).stdout)["targets"]
    assert rows[0]["kind"] == "MLA-33+32"
    assert rows[0]["parameters"] == sum(tensor.numel() for tensor in weights(full).values())
    assert [row["kind"] for row in rows[1:]] == facts["latents_possible"]
    for row in rows[1:]:
        rank, rope = row["kind"].removeprefix("MLA-").split("+")
        ok(convert("mla", full, tmp_path / rank, "--kv-lora-rank", rank, "--qk-rope-head-dim", rope, "--method", "svd"))
        assert row["parameters"] == sum(tensor.numel() for tensor in weights(tmp_path / rank).values())
    models = [shelf(duplicated=2), full, tmp_path / rank]
    _, same, small = json.loads(ok(convert("eval", *models, "--text", words, "--json", "-q")).stdout)["models"]
    assert same["kl_to_source"] == pytest.approx(0, abs=1e-6)
    assert small["kl_to_source"] > 1e-3
    for entry, values in ((same, 65), (small, int(rank) + int(rope))):
        assert entry["kv_bytes_per_token"] == entry["kv_bytes_measured"] == 3 * values * 4


@pytest.mark.parametrize("command", [["gqa", "--groups", 2], ["mqa"]], ids=lambda command: command[0])
def test_a_latent_has_no_heads_to_merge(command: list[Any], full: Path, convert: Convert, tmp_path: Path) -> None:
    result = convert(command[0], full, tmp_path / "out", *command[1:])
    left_nothing(result, 2, "MLA-33+32 has a latent and no KV heads to merge", tmp_path / "out")
    assert result.stderr.splitlines()[1].startswith("hint: convert the original MHA checkpoint")


DEEPSEEK: dict[str, dict[str, Any]] = {
    "experts": {"first_k_dense_replace": 1, "n_routed_experts": 4},
    "a latent of the queries": {"q_lora_rank": 24},
    "no biases": {"attention_bias": False},
}


@pytest.mark.parametrize("case", DEEPSEEK)
def test_what_kvfold_did_not_write_is_not_converted(case: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """By its config alone: the stock class has no place for a latent behind its norm."""
    source = edit(checkpoint("deepseek_v3"), **DEEPSEEK[case])
    (source / "model.safetensors").unlink()
    left_nothing(convert("gqa", source, tmp_path / "out", "--groups", 2), 2, "no KV heads to merge", tmp_path / "out")
    facts = json.loads(ok(convert("inspect", source, "--json")).stdout)
    assert "it has latent attention already" in facts["output_classes"]["mla"]


@pytest.mark.parametrize("way", ["weighted", "pca", "weighted with text"])
def test_a_latent_norm_that_does_something_is_refused_by_its_weights(
    way: str, convert: Convert, words: Path, tmp_path: Path
) -> None:
    mla_model(neutral=()).save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source")
    result = convert("mla", tmp_path / "source", tmp_path / "out", "--kv-lora-rank", 12, "--qk-rope-head-dim", 8,
                     *method_options(way, words), "-q")  # fmt: skip
    left_nothing(result, 1, "the norm of layer 0's latent is not neutral", tmp_path / "out")
    assert len(result.stderr.splitlines()) == 2, "an error and a hint"
