"""Output classes of MLA whose results need kvfold's class: exact at full size for every family, and the same however run."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import decodes_alike
from latents import method_options, same_logits, tokens, tolerance
from rows import rows
from tiny import tiny_config
from written import Convert, Make, left_nothing, ok, weights

from attention import load
from attention.latent import LatentAttention
from attention.models import MODEL_TYPE
from attention.models.modeling_kvfold import KvfoldLatentAttention as Own
from attention.spec import AttentionSpec
from attention.versions import keep_caps
from convert.families import FAMILIES
from convert.hosts.deepseek_v3 import HOST as DEEPSEEK
from convert.hosts.kvfold import LATENT_HOST
from convert.hosts.minicpm3 import HOST as MINICPM3
from eval.inputs.source import Source
from eval.quality.cost import measured_bytes_per_token

MIXED: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = PLAIN | {"rope_type": "dynamic", "factor": 4.0}
# What no stock class of latent attention can hold, of families that one can hold otherwise.
BEYOND: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": True, "attention_bias": True},
    "mistral": {"sliding_window": 7},
    "ministral": {"sliding_window": 7, "layer_types": ["sliding_attention"] * 3},
    "ernie4_5": {"use_bias": True, "mlp_bias": True},
    "gemma": {"rope_parameters": DYNAMIC},
    "helium": {"mlp_bias": True},
    **dict.fromkeys(("cohere2", "exaone4", "gemma3_text"), MIXED),
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 0.5},
    "vaultgemma": {"attn_logit_softcapping": 0.5},
    "olmo3": MIXED | {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN}},
    "cwm": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "phi3": {"sliding_window": 7},
    "gpt_neo": {"window_size": 7},
    "qwen2": {"sliding_window": 7, "use_sliding_window": True, "layer_types": None, "max_window_layers": 1},
    "seed_oss": {"mlp_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1], "mlp_bias": True},
}
NO_ROPE = ("biogpt", "bloom", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt", "xglm")
INSIDE = {"codegen": "phi", "gptj": "phi"}  # their own classes give RoPE to no other attention
NORM_SWITCHES = {"cohere": {"use_qk_norm": True}, "phi": {"qk_layernorm": True}, "stablelm": {"qk_layernorm": True}}
CLIPPED: dict[str, dict[str, Any]] = {  # to less than most of what is projected
    "mpt": {"attn_config": {"clip_qkv": 0.5}},
    "olmo": {"clip_qkv": 0.5},
    "olmoe": {"clip_qkv": 0.5},
}
ALWAYS_NORMALISED = ("apertus", "exaone4", "gemma3_text", "olmo2", "olmo3", "olmoe", "qwen3", "qwen3_moe")
WITH_HEADS = [name for name in sorted(LATENT_HOST.families) if FAMILIES[name].has_heads]
NORMALISED = [f"{name}, QK-norm" for name in NORM_SWITCHES]
NORM = {"kind": "rms", "scope": "head", "per_head": False, "bias": False, "eps": 1e-6, "gain_offset": 0.0}


def made(checkpoint: Make, case: str, **changes: Any) -> Path:
    model_type, _, also = case.partition(", ")
    more = {"": {}, "QK-norm": NORM_SWITCHES, "clipped": CLIPPED}[also].get(model_type, {})
    return checkpoint(model_type, **{**BEYOND.get(model_type, {}), **more, **changes})


def full(source: Path) -> list[Any]:
    """The options of full size: every rotary component, and all the rest in the latent."""
    from convert.planning.bounds import LatentBounds

    read = Source.parse(str(source))
    family = FAMILIES[read.model_type]
    rotaries = [family.rotary(read.config, layer) for layer in range(3)]
    rope = family.spec(read.config).num_kv_heads * max((rotary.dims for rotary in rotaries if rotary), default=0)
    return sized(LatentBounds(read, family, LATENT_HOST).full_rank(rope), rope)


def sized(rank: int, rope: int) -> list[Any]:
    return ["--kv-lora-rank", rank, *(["--qk-rope-head-dim", rope] if rope else [])]


def small(model_type: str) -> list[Any]:
    return sized(24, 0 if model_type.partition(",")[0] in NO_ROPE else 4)


def stock(path: Path, **arguments: Any) -> Any:
    """The class as transformers loads it, not absorbed."""
    from transformers import AutoModelForCausalLM

    return keep_caps(AutoModelForCausalLM.from_pretrained(path, **arguments)).eval()


def said(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


# One of each kind: windows, biases, no RoPE, ALiBi, some RoPE, layers without, experts, QK-norm of each form, other residuals.
KINDS = (
    "biogpt", "bloom", "codegen", "cohere, QK-norm", "cohere2", "cwm", "exaone4", "falcon", "gemma2", "gemma3_text", "glm",
    "gpt2", "gpt_neo", "gpt_neox", "granite", "llama", "mixtral", "mpt", "mpt, clipped", "nemotron", "olmo, clipped", "olmo2",
    "olmo3", "opt", "phi, QK-norm", "qwen3", "smollm3", "stablelm, QK-norm", "stablelm", "xglm",
)  # fmt: skip
# A norm, a cap and windows; ALiBi; no RoPE on some layers; experts; the plainest.
FEW = ("bloom", "gemma2", "gpt2", "llama", "mixtral", "olmo2", "smollm3", "stablelm, QK-norm")


@pytest.mark.parametrize(
    ("method", "model_type"),
    rows(
        [
            *(("svd", name) for name in (*WITH_HEADS, *NORMALISED, *(f"{name}, clipped" for name in CLIPPED))),
            *(("weighted with text", name) for name in KINDS),
        ],
        [*(("svd", name) for name in KINDS), *(("weighted with text", name) for name in FEW)],
    ),
)
def test_full_size_gives_the_sources_logits(
    method: str, model_type: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = made(checkpoint, model_type)
    ok(convert("mla", source, tmp_path / "out", *full(source), *method_options(method, words)))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    inside = INSIDE.get(model_type, model_type.partition(",")[0])
    assert (config["model_type"], config["text_config"]["model_type"]) == (MODEL_TYPE, inside)
    name, _, also = model_type.partition(", ")
    assert bool(config.get("qk_norm")) == (also == "QK-norm" or name in ALWAYS_NORMALISED)
    assert config.get("clip_qkv") == (0.5 if also == "clipped" else None)
    ids = tokens(20)  # beyond the windows and the positions that YARN was made for
    expected = said(stock(source), ids)
    same_logits(said(stock(tmp_path / "out"), ids), expected, tolerance(method))
    same_logits(said(load(tmp_path / "out", when="always"), ids), expected, tolerance(method))


@pytest.mark.parametrize("model_type", rows(KINDS, FEW))
def test_small_sizes_run_alike_in_every_way(model_type: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = made(checkpoint, model_type)
    ok(convert("mla", source, tmp_path / "out", *small(model_type)))
    plain, absorbed = stock(tmp_path / "out"), load(tmp_path / "out", when="always")
    assert all(isinstance(module, LatentAttention) for module in absorbed.modules() if isinstance(module, Own))
    ids = tokens(12)
    expected = said(plain, ids)
    same_logits(said(absorbed, ids), expected)
    eager = load(tmp_path / "out", attn_implementation="eager")
    same_logits(said(eager, ids), expected)
    with torch.inference_mode():
        out = eager(ids, output_attentions=True)
        assert out.attentions[0].shape == (2, 8, 12, 12)
        beams = [model.generate(ids[:1], num_beams=3, max_new_tokens=8, do_sample=False) for model in (plain, absorbed)]
    assert beams[0].shape == beams[1].shape
    assert torch.equal(decodes_alike(plain, ids, static=False), decodes_alike(absorbed, ids))
    absorbed.save_pretrained(tmp_path / "again")
    same_logits(said(stock(tmp_path / "again"), ids), expected, 1e-6)


@pytest.mark.parametrize(
    "model_type",
    rows(["bloom", "falcon", "gemma", "gpt2", "gpt_neo", "gpt_neox", "gptj", "mixtral", "mpt", "olmo", "qwen3", "xglm"]),
)
def test_half_precision_is_that_of_the_source(model_type: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, ids = made(checkpoint, model_type), tokens(12)
    ok(convert("mla", source, tmp_path / "out", *full(source), "--method", "svd", "--dtype", "bfloat16"))
    exact, half = said(stock(source), ids), said(stock(source, dtype=torch.bfloat16), ids)

    def error(found: torch.Tensor) -> float:
        if model_type == "mixtral":  # rounding gives a token another expert, and those behind it other keys: most have theirs
            return float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
        return float((found - exact).norm() / exact.norm())

    for model in (stock(tmp_path / "out", dtype=torch.bfloat16), load(tmp_path / "out", when="always", dtype=torch.bfloat16)):
        assert error(said(model, ids)) < 3 * error(half) + 0.02


@pytest.mark.parametrize(
    "model_type",
    rows(
        ["mistral", "mixtral", "starcoder2", "ministral", "cwm", "cohere2", "exaone4", "gemma3_text", "olmo3", "qwen3"],
        ["mistral", "gemma3_text", "olmo3", "qwen3"],
    ),
)
def test_attention_functions_are_told_the_window(
    model_type: str, checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention knows it by nothing else."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    windows: list[int | None] = []

    def spying(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
        windows.append(sliding_window)
        return sdpa_attention_forward(*args, **kwargs)

    switch = {"use_sliding_window": True, "max_window_layers": 1} if model_type == "qwen3" else {}
    source = made(checkpoint, model_type, sliding_window=7, **switch)
    ok(convert("mla", source, tmp_path / "out", *small(model_type)))
    AttentionInterface.register("spying", spying)
    for path in (source, tmp_path / "out"):
        model = stock(path)
        model.set_attn_implementation("spying")
        said(model, tokens(12))
    assert windows[:3] == windows[3:]
    assert 7 in windows


def test_attention_functions_are_told_the_cap(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Absorbed decoding caps by itself with eager attention alone; other functions then do all of the attention."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    caps: list[float | None] = []

    def capping(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        caps.append(softcap)
        return sdpa_attention_forward(*args, **kwargs)

    ok(convert("mla", made(checkpoint, "gemma2"), tmp_path / "out", *small("gemma2")))
    AttentionInterface.register("capping", capping)
    for opened in (stock, lambda path, **given: load(path, when="always", **given)):
        model = opened(tmp_path / "out")
        model.set_attn_implementation("capping")
        with torch.inference_mode():
            model.generate(tokens(12), max_new_tokens=3, do_sample=False)
        assert caps == [0.5] * 9, "three layers, three steps"
        caps.clear()
    with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product"):
        stock(tmp_path / "out", attn_implementation="sdpa")
    eager = stock(tmp_path / "out")
    assert eager.config._attn_implementation == "eager"
    eager.model.config._attn_implementation = "paged|eager"
    with pytest.raises(ValueError, match="eager leaves out"):
        next(module for module in eager.modules() if isinstance(module, Own)).attention_arguments()


def test_a_window_that_only_the_function_knows_is_not_absorbed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = made(checkpoint, "mistral")
    ok(convert("mla", source, tmp_path / "out", *small("mistral")))
    module = next(m for m in load(tmp_path / "out", when="always").modules() if isinstance(m, LatentAttention))
    padding = torch.ones(1, 9)
    assert [module._absorbs(1, cached, None) for cached in (7, 8)] == [True, False]
    assert [module._absorbs(2, cached, padding) for cached in (7, 8)] == [True, False]
    assert module._absorbs(2, 9, torch.ones(1, 1, 2, 9))


def test_windows_count_alike_in_plans_cards_and_caches(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """A latent of kvfold's class; also absorbed, and in int8, of which layers with windows forget as much."""
    source, ids = made(checkpoint, "gemma3_text"), tokens(40)
    done = json.loads(ok(convert("mla", source, tmp_path / "out", *small("gemma3_text"), "--json")).stdout)
    row = (24 + 4) * 4
    held = {"before": (2 * 6 + 128) * 2 * 32 * 4 / 128, "after": (2 * 6 + 128) * row / 128, "cache_dtype": "float32"}
    assert done["conversion"]["kv_bytes_per_token"] == held | {"context": 128}
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| KV cache, bytes per token at 128 tokens | {held['before']:.0f} | {held['after']:.0f} (" in card
    assert "the windowed layers (2 of 3, which see 7 tokens) are 8.6% of the cache at 128 tokens" in card
    assert measured_bytes_per_token(stock(tmp_path / "out"), "float32", 128) == held["after"]
    model = load(tmp_path / "out", when="always", dtype=torch.float64, cache_dtype="int8")
    with torch.no_grad():
        whole, cache, found = model(ids).logits, None, []
        for piece in ids.split([9, *[1] * 31], 1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-6)
    spec = AttentionSpec.from_config(model.config)
    assert sum(layer.nbytes for layer in cache.layers) == len(ids) * spec.cache_bytes("int8", 40)


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "gpt2", "gpt_neox", "gptj", "gemma", "mpt", "qwen3"])
def test_the_cache_has_the_bytes_that_the_plan_says(
    model_type: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = made(checkpoint, model_type)
    planned = json.loads(convert("mla", source, tmp_path / "out", *small(model_type), "--dry-run", "--json").stdout)
    ok(convert("mla", source, tmp_path / "out", *small(model_type)))
    assert planned["kv_bytes_per_token_after"] == 3 * (24 + (0 if model_type in NO_ROPE else 4)) * 4
    assert measured_bytes_per_token(load(tmp_path / "out"), "float32") == planned["kv_bytes_per_token_after"]


def test_without_rope_half_of_the_cache_loses_nothing(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Keys and values of MHA are linear in one input, whose width is half of theirs."""
    source = checkpoint("gpt2")
    shown = ok(convert("mla", source, tmp_path / "out", "--kv-budget", "50%")).stdout
    assert "MHA → MLA-64+0" in shown
    assert "(50.0%" in shown
    same_logits(said(stock(tmp_path / "out"), tokens(20)), said(stock(source), tokens(20)))
    for budget, kind in (("100%", "MLA-64+0"), ("25%", "MLA-32+0")):
        facts = json.loads(convert("mla", source, tmp_path / "less", "--kv-budget", budget, "--dry-run", "--json").stdout)
        assert facts["target"] == kind
    least = convert("mla", source, tmp_path / "less", "--kv-budget", "11")
    left_nothing(least, 2, "the least is 12 bytes per token", tmp_path / "less")


@pytest.mark.parametrize("method", ["svd", "weighted", "weighted with text", "pca"])
def test_every_method_makes_latents_without_rope(
    method: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source, options = checkpoint("gpt2"), method_options(method, words)
    ok(convert("mla", source, tmp_path / "out", "--kv-lora-rank", 64, *options))
    same_logits(said(stock(tmp_path / "out"), tokens(20)), said(stock(source), tokens(20)), tolerance(method))
    more = ["--refine", 2] if "text" in method else []
    ok(convert("mla", source, tmp_path / "less", "--kv-lora-rank", 9, *options, *more))
    assert torch.isfinite(said(load(tmp_path / "less"), tokens(20))).all()


@pytest.mark.parametrize(
    ("method", "model_type"),
    rows(
        product(
            ("svd", "weighted", "weighted with text", "pca"),
            ("olmo2", "olmoe, clipped", "phi, QK-norm", "qwen3", "stablelm, QK-norm"),
        ),
        [("weighted with text", "stablelm, QK-norm"), ("weighted with text", "qwen3"), ("pca", "phi, QK-norm"),
         ("weighted", "olmoe, clipped"), ("svd", "olmo2")],
    ),
)  # fmt: skip
def test_every_method_makes_latents_of_normalised_keys(
    method: str, model_type: str, checkpoint: Make, convert: Convert, words: Path, tmp_path: Path
) -> None:
    source = made(checkpoint, model_type, num_key_value_heads=2)
    more = ["--refine", 2] if "text" in method else []
    ok(convert("mla", source, tmp_path / "out", *small(model_type), *method_options(method, words), *more))
    assert torch.isfinite(said(load(tmp_path / "out"), tokens(20))).all()
    before, after = weights(source), weights(tmp_path / "out")
    kept = [
        name for name in before if "layernorm" in name or "_norm" in name or name.endswith(("k_proj.weight", "v_proj.weight"))
    ]
    for name in kept:
        own = "model." + name.replace("q_layernorm", "q_norm").replace("k_layernorm", "k_norm")
        if ".norms." not in name:
            assert torch.equal(after[own].flatten(), before[name].flatten()), name


def test_normalised_keys_share_no_latent_beyond_their_dims(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """The model's width does not bound their rank: 2 × 8 heads × 8 dims are 128."""
    shown = ok(convert("mla", checkpoint("qwen3", num_key_value_heads=8), tmp_path / "out", *sized(124, 4))).stdout
    assert "124 of 124 latent channels" in shown
    more = convert("mla", checkpoint("qwen3", name="other", num_key_value_heads=8), tmp_path / "more", *sized(125, 4))
    left_nothing(more, 2, "rank 125 exceeds full size", tmp_path / "more")


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
def test_the_sources_own_frequencies_rotate(kind: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    """Also those that change with the length, and those with an attention factor."""
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [3.0, 1.0, 4.0, 9.0]}
    if kind != "dynamic":
        parameters["original_max_position_embeddings"] = 16
    source = checkpoint("llama", mlp_bias=True, rope_parameters=parameters, max_position_embeddings=32)
    ok(convert("mla", source, tmp_path / "out", *full(source)))
    for length in (12, 60):
        same_logits(said(stock(tmp_path / "out"), tokens(length)), said(stock(source), tokens(length)))


@pytest.mark.parametrize("model_type", ["codegen", "gpt2", "gpt_neox", "mpt", "olmo, clipped", "olmo2", "smollm3"])
def test_a_result_is_a_source(model_type: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, ids = made(checkpoint, model_type), tokens(20)
    ok(convert("mla", source, tmp_path / "out", *full(source), "--method", "svd"))
    ok(convert("mla", tmp_path / "out", tmp_path / "less", *small(model_type), "--method", "svd"))
    ok(convert("mla", source, tmp_path / "once", *small(model_type), "--method", "svd"))
    assert torch.isfinite(said(load(tmp_path / "less"), ids)).all()
    twice, once = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("less", "once"))
    for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "model_type"):
        assert twice["text_config"][key] == once["text_config"][key]
    assert len(twice["rope_pairs"]) == len(once["rope_pairs"]) == once["text_config"]["qk_rope_head_dim"] // 2
    ok(convert("mla", tmp_path / "out", tmp_path / "same", *full(source), "--force"))
    before, after = weights(tmp_path / "out"), weights(tmp_path / "same")
    assert all(torch.equal(before[name], after[name]) for name in before), "a copy"
    more = convert("mla", tmp_path / "less", tmp_path / "more", *sized(25, 0 if model_type in NO_ROPE else 4))
    left_nothing(more, 2, "rank 25 exceeds full size", tmp_path / "more")
    refused = convert("mqa", tmp_path / "out", tmp_path / "one")
    left_nothing(refused, 2, "has a latent and no KV heads to merge", tmp_path / "one")
    facts = json.loads(convert("inspect", tmp_path / "out", "--json").stdout)
    assert (facts["family"], facts["attention"][:4], facts["kv_heads"]) == (MODEL_TYPE, "MLA-", None)


def test_grouped_heads_of_the_class_become_latent(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("gpt_neox", duplicated=2)
    ok(convert("gqa", source, tmp_path / "four", "--groups", 4))
    ok(convert("mla", tmp_path / "four", tmp_path / "out", *sized(56, 8), "--method", "svd"))
    same_logits(said(stock(tmp_path / "out"), tokens(20)), said(stock(source), tokens(20)))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("hunyuan_v1_dense", {}, "queries and keys are normalised after RoPE"),
        ("olmo", {"clip_qkv": 0.0}, "clip_qkv is 0.0"),
        ("mpt", {"attn_config": {"clip_qkv": -1.0}}, "attn_config.clip_qkv is -1.0"),
        ("phimoe", {}, "its class scales RoPE by a factor that depends on the length"),
    ],
)
def test_what_it_does_not_do_is_refused_before_weights_are_read(
    model_type: str, changes: dict[str, Any], message: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = made(checkpoint, model_type, **changes)
    (source / "model.safetensors").unlink()
    left_nothing(convert("mla", source, tmp_path / "out", *sized(24, 4)), 2, message, tmp_path / "out")


def test_a_rope_key_is_for_what_rotates(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    for model_type, size, message in (
        ("gpt2", sized(24, 4), "has no RoPE, so it has no RoPE key of 4 dims"),
        ("gpt_neox", sized(24, 0), "give --kv-lora-rank and --qk-rope-head-dim, or --kv-budget"),
        ("gpt_neox", ["--kv-lora-rank", 24, "--qk-rope-head-dim", 0], "where keys rotate, a RoPE key needs at least 2"),
        ("gpt2", ["--kv-lora-rank", 65], "rank 65 exceeds full size"),
    ):
        out = tmp_path / "out"
        left_nothing(convert("mla", made(checkpoint, model_type), out, *size), 2, message, out)


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
    changes: dict[str, Any], message: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    ok(convert("mla", checkpoint("gpt_neox"), tmp_path / "out", *sized(24, 4)))
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    inner = config["text_config"] | changes.pop("text_config", {})
    path.write_text(json.dumps(config | changes | {"text_config": inner}))
    found = convert("inspect", tmp_path / "out")
    assert found.exit_code == 2
    assert message in found.stderr


def test_dropout_is_where_the_source_has_it(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    for model_type, option in (("gpt2", "resid_pdrop"), ("seed_oss", "residual_dropout"), ("phi", "resid_pdrop")):
        source = made(checkpoint, model_type, name=model_type, **{option: 0.25})
        ok(convert("mla", source, tmp_path / f"{model_type}-out", *small(model_type)))
        modules = [m for m in stock(tmp_path / f"{model_type}-out").modules() if isinstance(m, Own)]
        assert {module.output_dropout for module in modules} == {0.0 if model_type == "phi" else 0.25}


def test_what_stock_classes_cannot_hold_is_held() -> None:
    """Every entry of `BEYOND` is indeed refused there, so that the tests above are about this class."""
    for name, changes in BEYOND.items():
        config, family = tiny_config(name, **changes), FAMILIES[name]
        target = family.spec(config).latent(8, 2)
        assert all(host.refuses(family, config, target) for host in (DEEPSEEK, MINICPM3)), name
        assert LATENT_HOST.refuses(family, config, target) is None, name
