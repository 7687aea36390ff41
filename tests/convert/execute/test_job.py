"""Converted layers compute what the source's did, in whole models: as published, of every RoPE and shape, of trained weights.

That each output class is exact at full size, of every family, tests/convert/hosts/test_contract.py holds.
"""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL, full_size, logits_of, method_options, same_logits, tolerance
from rows import rows
from safetensors.torch import save_file
from tiny import ROPES, SWITCHES
from tiny_mla import tokens
from transformers import AutoModelForCausalLM
from written import Convert, Find, Logits, Make, damage, edit, ok, read, refused, weights

from attention import load
from attention.spec import AttentionSpec
from convert.demo.showcase import MODEL
from convert.families import FAMILIES
from convert.families.reading import family_for
from eval.inputs.source import Source

WITH_KV_HEADS = [name for name, family in FAMILIES.items() if family.has_heads]


def test_merged_heads_are_rounded_once(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    ok(convert("gqa", source, tmp_path / "half", "--groups", 4, "--dtype", "bfloat16"))
    ok(convert("gqa", tmp_path / "half", tmp_path / "wide", "--groups", 2, "--dtype", "float32", "--method", "mean"))
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = weights(tmp_path / "half")[name].float().unflatten(0, (2, 2, 8))
    torch.testing.assert_close(weights(tmp_path / "wide")[name], rows.mean(1).flatten(0, 1), rtol=1e-6, atol=0)


def parts_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors but those of attentions, by role."""
    family = family_for(Source.parse(str(path)).config)
    found: dict[str, torch.Tensor] = {}
    attention = {name for layer in range(2) for name in family.shapes(layer)}
    for name, tensor in weights(path).items():
        if name not in attention:
            place = family.names.place(name)
            assert place is not None, name
            found |= place.split(tensor)
    return found


@pytest.mark.parametrize(
    "model_type", rows(WITH_KV_HEADS, ["llama", "phi3", "gpt2", "bloom", "gpt_neox", "qwen3_moe", "stablelm", "opt"])
)
def test_every_family_is_calibrated_as_published_and_equal_heads_stay_lossless(
    model_type: str, checkpoint: Make, convert: Convert, logits: Logits, letters: Path, tmp_path: Path
) -> None:
    """The text has no token of most of the vocabulary, and not the one for padding."""
    switches = dict.fromkeys(SWITCHES, True)
    source = checkpoint(model_type, as_published=True, duplicated=2, num_hidden_layers=2, **switches)
    few = ["--text", letters, "--calibration-tokens", 64, "--calibration-context", 16, "--dtype", "float32"]
    groups = AttentionSpec.from_config(Source.parse(str(source)).config).num_kv_heads // 2
    ok(convert("gqa", source, tmp_path / "out", "--groups", groups, *few))
    same_logits(logits(tmp_path / "out"), logits(source), 1e-3)
    before, after = parts_of(source), parts_of(tmp_path / "out")
    assert before.keys() - after.keys() <= {"padding_positions.weight"}
    assert all(torch.equal(before[role].float(), after[role]) for role in after)


NO_POSITIONS = {"no_rope_layers": [1, 0, 1], "hidden_size": 96}
# Sources of a latent of full size, with what its logits depend on beside the family.
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{kind} RoPE": ("llama", {"rope_parameters": rope}) for kind, rope in ROPES.items() if kind != "dynamic"},
    "MHA": ("llama", {"num_key_value_heads": 8}),
    "MQA": ("llama", {"num_key_value_heads": 1}),
    "GQA": ("llama", {"num_key_value_heads": 2, "num_attention_heads": 16}),
    "a tied head": ("llama", {"tie_word_embeddings": True}),
    "heads wider than the model": ("llama", {"num_key_value_heads": 8, "head_dim": 16}),
    "narrow heads": ("llama", {"head_dim": 4}),
    "one wide head": ("llama", {"num_key_value_heads": 1, "head_dim": 80}),
    "one layer": ("llama", {"num_hidden_layers": 1}),
    "biases": ("llama", {"attention_bias": True}),
    "biases but the output's": ("seed_oss", {"attention_bias": True, "attention_out_bias": False}),
    "biases, a layer without positions": ("smollm3", NO_POSITIONS | {"attention_bias": True}),
    "layers without positions": ("smollm3", NO_POSITIONS | {"no_rope_layers": [0, 1, 0]}),
    "keys of zeros": ("llama", {}),
    "values of zeros": ("llama", {}),
}  # fmt: skip
FITTED, WITH_TEXT = ("longrope RoPE", "GQA", "biases", "layers without positions", "keys of zeros"), "weighted with text"
FAST = [row for row in SOURCES if row not in ("default RoPE", "linear RoPE", "one layer", "narrow heads", "MHA")]


@pytest.mark.parametrize(
    ("method", "case"),
    rows(product(("svd", WITH_TEXT), SOURCES), [*(("svd", row) for row in FAST), *((WITH_TEXT, row) for row in FITTED)]),
)
def test_full_size_is_exact(method: str, case: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path) -> None:
    model_type, changes = SOURCES[case]
    source, out = checkpoint(model_type, **changes), tmp_path / "out"
    if case.endswith("of zeros"):
        name = "k_proj" if case.startswith("keys") else "v_proj"
        damage(source, lambda tensors: tensors[f"model.layers.1.self_attn.{name}.weight"].zero_())
    heads, dim, width = (changes.get(*of) for of in (("num_key_value_heads", 4), ("head_dim", 8), ("hidden_size", 64)))
    size = full_size(heads, dim, width)
    if "no_rope_layers" in changes:  # all of their keys go into the latent, which is full at 2 G D
        size = ["--kv-lora-rank", 65, "--qk-rope-head-dim", 32]
        refused(convert("mla", source, out, "--kv-lora-rank", 66, *size[2:], "--method", "svd"), 2, "use --kv-lora-rank 65")
    said = ok(convert("mla", source, out, *size, *method_options(method, words))).stdout
    for length in (12, 100):  # before and beyond original_max_position_embeddings
        same_logits(logits_of(out, tokens(2, length)), logits_of(source, tokens(2, length)), tolerance(method))
    found, config = weights(out), read(out / "config.json")
    assert ("lm_head.weight" in found) == ("lm_head.weight" in weights(source))
    assert config["rope_parameters"]["rope_type"] == "longrope" or dim == 80, "components of each frequency are no plain stride"
    if "attention_bias" in changes:  # through the latent of queries
        assert f"query biases go through q_a_proj, an identity with a constant: {width} × {width + 16} more" in said
        assert config["q_lora_rank"] == width + 16
    for layer, turns in enumerate(changes.get("no_rope_layers", ())):
        assert bool(found[f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"][-32:].any()) == bool(turns)


def test_channels_of_zeros_change_nothing(shelf: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source, beyond = shelf(), ["--kv-lora-rank", 48, "--qk-rope-head-dim", 32]
    shown = ok(convert("mla", source, tmp_path / "out", *beyond, "--pad-rank"))
    note = read(tmp_path / "out" / "conversion.json")["notes"][0]
    assert note.startswith("32 of 48 latent channels carry keys and values")
    assert "15 are zero" in note
    assert note in shown.stdout
    down = weights(tmp_path / "out")["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert (down[:48].abs().amax(1) == 0).sum() == 15 + 1
    same_logits(logits(tmp_path / "out"), logits(source))


def with_gains(tensors: dict[str, torch.Tensor], gain: float) -> None:
    """The same function, whose attention has inputs so many times as large."""
    for name, tensor in tensors.items():
        if name.endswith("input_layernorm.weight"):
            tensor.mul_(gain)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor.div_(gain)


@pytest.mark.parametrize(
    ("model_type", "gain"), rows([*product(("llama", "qwen2"), (1, 0.01)), ("qwen2", 64)], [("llama", 0.01), ("qwen2", 64)])
)
def test_float16_runs_in_the_stock_class(
    model_type: str, gain: float, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    """Of results in float16, in float32 and in bfloat16, each rounded once."""
    source = damage(checkpoint(model_type), lambda tensors: with_gains(tensors, gain))
    save_file({name: tensor.half() for name, tensor in weights(source).items()}, source / "model.safetensors")
    edit(source, dtype="float16")
    expected, found = logits_of(source, tokens(2, 24)), dict[str, dict[str, torch.Tensor]]()
    for dtype, rounding in ((None, 0.005), ("float32", 0.005), ("bfloat16", 0.05)):
        out = tmp_path / str(dtype)
        ok(convert("mla", source, out, *full_size(4, 8), *(["--dtype", dtype] if dtype else [])))
        half = logits_of(out, tokens(2, 24), torch.float16).float()
        assert float((half - expected).abs().mean()) < rounding * float(expected.abs().mean()), dtype
        assert read(out / "config.json")["dtype"] == (dtype or "float16")
        assert {tensor.dtype for tensor in weights(out).values()} == {getattr(torch, dtype or "float16")}
        found[str(dtype)] = weights(out)
    same_logits(logits_of(tmp_path / "float32", tokens(2, 24)), expected)
    wide = found["float32"]
    assert all(torch.equal(found["bfloat16"][name], wide[name].bfloat16()) for name in wide)


@pytest.mark.parametrize("content", rows(["a" * 2000, "the same again. " * 200, "ab" * 64], ["a" * 2000]), ids=range(3))
def test_poor_texts_give_finite_models(
    content: str, checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    """One character, a sentence again and again, and one block."""
    source = checkpoint()
    (tmp_path / "poor.txt").write_text(content)
    options = ["--method", "pca", "--text", tmp_path / "poor.txt", "--refit", "--calibration-tokens", 512]
    ok(convert("mla", source, tmp_path / "out", *SMALL, *options))
    assert torch.isfinite(logits(tmp_path / "out")).all()
    ok(convert("mla", source, tmp_path / "full", *full_size(4, 8), *options))
    same_logits(logits(tmp_path / "full"), logits(source), 1e-3)


@pytest.mark.parametrize(
    ("name", "held"), [("latent in shards", 16 + 8), ("whole latent", 33 + 32), ("latent with text", 8 + 4)]
)
def test_the_live_cache_is_what_the_config_says(name: str, held: int, finished: Find) -> None:
    made = finished(name)
    model = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32).eval()
    spec = AttentionSpec.from_config(model.config)
    assert spec.values_per_token == 3 * held
    for running in (model, load(made.path, dtype=torch.float32, when="always").eval()):
        with torch.inference_mode():
            cache = running(tokens(2, 10)).past_key_values
            layers = running(tokens(2, 1), past_key_values=cache).past_key_values.layers
        assert sum(part.nbytes for layer in layers for part in (layer.keys, layer.values)) == 2 * 11 * 3 * held * 4
    assert made.provenance["kv_bytes_per_token"]["after"] == spec.bytes_per_token("float32") == 3 * held * 4


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint in fp32, with each second KV head equal to the one before: trained weights of a known rank."""
    path = Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("paired") / "source"))
    tensors = {name: tensor.float() for name, tensor in weights(MODEL).items()}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = tensor.unflatten(0, (4, 2, -1))
            tensors[name] = heads[:, :1].expand_as(heads).reshape(tensor.shape).contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return edit(path, dtype="float32")


@pytest.mark.parametrize(("rank", "rope", "exact"), [(129, 128, True), (129, 126, False), (97, 128, False)])
def test_the_bundled_model_is_lossless_down_to_its_true_rank(
    rank: int, rope: int, exact: bool, paired: Path, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    """4 heads of 32 dims differ: 128 rotary dims and 128 of values are all there is."""
    ok(convert("mla", paired, tmp_path / "out", "--kv-lora-rank", rank, "--qk-rope-head-dim", rope))
    difference = float((logits(tmp_path / "out") - logits(paired)).abs().max())
    assert (difference < 1e-4) if exact else (difference > 1e-2)
