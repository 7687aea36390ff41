"""Latents in kvfold's class: what its attention tells and is told, its sizes, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from held import Row, full, latent_of, said, sized, small, stock
from latents import same_logits
from rows import rows
from tiny import ROPES
from tiny_mla import logits, tokens
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from written import Convert, Make, edit, left_nothing, ok, refused

from attention import load
from attention.latent import can_absorb, is_absorbed
from attention.models import MODEL_TYPE
from attention.models.modeling_kvfold import KvfoldLatentAttention as Own
from attention.spec import AttentionSpec
from eval.quality.lockstep import measured_bytes_per_token


@pytest.fixture(scope="module")
def latent(shelf: Make, convert: Convert, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small latent of GPT-NeoX, which nothing changes."""
    out = tmp_path_factory.mktemp("latent") / "out"
    ok(convert("mla", shelf("gpt_neox"), out, *sized(24, 4)))
    return out


NORM = {"kind": "rms", "scope": "head", "per_head": False, "bias": False, "eps": 1e-6, "gain_offset": 0.0}


def made(checkpoint: Make, case: str, **changes: Any) -> Path:
    row = latent_of(case)
    return checkpoint(row.model_type, **{**row.changes, **changes})


def listening(name: str) -> list[tuple[Any, Any]]:
    """Window and cap that an attention function of this name will have been told."""
    told: list[tuple[Any, Any]] = []

    def listens(*args: Any, sliding_window: int | None = None, softcap: float | None = None, **kwargs: Any) -> Any:
        told.append((sliding_window, softcap))
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register(name, listens)
    return told


WINDOWED = ["mistral", "mixtral", "starcoder2", "ministral", "cwm", "cohere2", "exaone4", "gemma3_text", "olmo3", "qwen3"]


@pytest.mark.parametrize("model_type", rows(WINDOWED, ["gemma3_text", "olmo3"]))
def test_attention_functions_are_told_the_window(model_type: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Flash attention knows it by nothing else."""
    switch = {"use_sliding_window": True, "max_window_layers": 1} if model_type == "qwen3" else {}
    source = made(checkpoint, model_type, sliding_window=7, **switch)
    ok(convert("mla", source, tmp_path / "out", *small(latent_of(model_type))))
    told = listening("spying")
    for path in (source, tmp_path / "out"):
        model = stock(path)
        model.set_attn_implementation("spying")
        said(model, tokens(2, 12))
    assert told[:3] == told[3:]
    assert (7, None) in told


def test_attention_functions_are_told_the_cap(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Absorbed decoding caps by itself with eager attention alone; other functions then do all of the attention."""
    ok(convert("mla", made(checkpoint, "gemma2"), tmp_path / "out", *small(latent_of("gemma2"))))
    told = listening("capping")
    for opened in (stock, lambda path, **given: load(path, when="always", **given)):
        model = opened(tmp_path / "out")
        model.set_attn_implementation("capping")
        with torch.inference_mode():
            model.generate(tokens(2, 12), max_new_tokens=3, do_sample=False)
        assert [cap for _, cap in told] == [0.5] * 9, "three layers, three steps"
        told.clear()
    with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product"):
        stock(tmp_path / "out", attn_implementation="sdpa")
    eager = stock(tmp_path / "out")
    assert eager.config._attn_implementation == "eager"
    eager.model.config._attn_implementation = "paged|eager"
    with pytest.raises(ValueError, match="eager leaves out"):
        next(module for module in eager.modules() if isinstance(module, Own)).attention_arguments()


def test_a_window_that_only_the_function_knows_is_not_absorbed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = made(checkpoint, "mistral")
    ok(convert("mla", source, tmp_path / "out", *small(latent_of("mistral"))))
    module = next(filter(is_absorbed, load(tmp_path / "out", when="always").modules()))
    padding, given = torch.ones(1, 9), module.attention_arguments()
    assert [can_absorb(module, 1, cached, None, given) for cached in (7, 8)] == [True, False]
    assert [can_absorb(module, 1, cached, padding, given) for cached in (7, 8)] == [True, False]
    assert not can_absorb(module, 2, 7, padding, given), "a function decides what several queries see"
    assert can_absorb(module, 2, 9, torch.ones(1, 1, 2, 9), given)


def test_windows_count_alike_in_plans_cards_and_caches(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """A latent of kvfold's class; also absorbed, and in int8, of which layers with windows forget as much."""
    source, ids = made(checkpoint, "gemma3_text"), tokens(2, 40)
    done = json.loads(ok(convert("mla", source, tmp_path / "out", *small(latent_of("gemma3_text")), "--json")).stdout)
    row = (24 + 4) * 4
    held = {"before": (2 * 6 + 128) * 2 * 32 * 4 / 128, "after": (2 * 6 + 128) * row / 128, "cache_dtype": "float32"}
    assert done["conversion"]["kv_bytes_per_token"] == held | {"context": 128}
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| KV cache, bytes per token at 128 tokens | {held['before']:.0f} | {held['after']:.0f} (" in card
    assert "the windowed layers (2 of 3, which see 7 tokens) are 8.6% of the cache at 128 tokens" in card
    assert measured_bytes_per_token(stock(tmp_path / "out"), "float32", 128) == held["after"]
    model = load(tmp_path / "out", when="always", dtype=torch.float64, cache_dtype="int8")
    cache = DynamicCache()
    whole, found = logits(model, ids, chunks=[40]), logits(model, ids, chunks=[9], cache=cache)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)
    spec = AttentionSpec.from_config(model.config)
    assert sum(layer.nbytes for layer in cache.layers) == len(ids) * spec.cache_bytes("int8", 40)


def test_without_rope_a_budget_buys_a_latent_alone(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Keys and values of MHA are linear in one input, whose width is half of theirs: half of the cache is full size."""
    source, out = checkpoint("gpt2"), tmp_path / "out"
    for budget, kind in (("100%", "MLA-64+0"), ("50%", "MLA-64+0"), ("25%", "MLA-32+0")):
        planned = json.loads(convert("mla", source, out, "--kv-budget", budget, "--dry-run", "--json").stdout)
        assert planned["target"] == kind
    left_nothing(convert("mla", source, out, "--kv-budget", "11"), 2, "the least is 12 bytes per token", out)


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_the_sources_own_frequencies_rotate(kind: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Also those that change with the length, and those with an attention factor."""
    source = checkpoint("llama", mlp_bias=True, rope_parameters=ROPES[kind], max_position_embeddings=32)
    ok(convert("mla", source, tmp_path / "out", *full(source, Row("llama", MODEL_TYPE))))
    for length in (12, 60):
        same_logits(said(stock(tmp_path / "out"), tokens(2, length)), said(stock(source), tokens(2, length)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_pairs": [0]}, "rope_pairs is [0]; it must list 2 frequencies"),
        ({"rope_pairs": None}, "rope_pairs is None"),
        ({"rope_pairs": [0, "1"]}, "rope_pairs is [0, '1']"),
        ({"rope_factor": 0}, "rope_factor is 0; it must be a number above 0"),
        ({"text_config": {"v_head_dim": None}}, "the sizes of the latent in text_config"),
        ({"qk_norm": {"kind": "rms"}}, "it must have the keys kind, scope, per_head, bias, eps and gain_offset"),
        ({"qk_norm": NORM | {"eps": None}}, "qk_norm has eps None; it must be a number of at least 0"),
        ({"clip_qkv": 0}, "clip_qkv is 0; it must be a number above 0"),
        ({"rope_factor": [1.0]}, "it must be a number above 0, or one for each of 3 layers"),
        ({"qk_norm": NORM | {"scope": "layer"}}, "qk_norm has scope 'layer'; it must be one of ('head', 'all')"),
    ],
)
def test_a_damaged_config_is_refused(
    changes: dict[str, Any], message: str, latent: Path, convert: Convert, tmp_path: Path
) -> None:
    out = shutil.copytree(latent, tmp_path / "out")
    inner = json.loads((out / "config.json").read_text())["text_config"] | changes.get("text_config", {})
    refused(convert("inspect", edit(out, **{**changes, "text_config": inner})), 2, message)
