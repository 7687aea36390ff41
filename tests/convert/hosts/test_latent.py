"""Stock classes of MLA: any list of frequencies in their config, gains stored whole, what they take, and portable results."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import logits_of, stock_module_computes
from records import factored
from rows import rows
from tiny import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer
from written import Make, damage, ok, weights

import attention
from attention.record import FactoredAttention
from attention.rope import Rotary, from_config
from attention.spec import AttentionSpec
from convert.families import FAMILIES, family_of
from convert.families.latent import V3, constants, level
from convert.hosts import Host
from convert.hosts.engines import ENGINES, running
from convert.hosts.latent import DEEPSEEK, PORTABLE, ladder_ratio, rope_parameters


def written(rotary: Rotary, **changes: Any) -> tuple[dict[str, Any], Rotary]:
    """What goes into the config, and what the stock class makes of it."""
    parameters = rope_parameters(rotary, tiny_config("llama", **changes))
    config = tiny_config("deepseek_v3", qk_rope_head_dim=rotary.dims, head_dim=rotary.dims, rope_parameters=parameters)
    return parameters, from_config(config, rotary.dims, "interleaved")


@settings(max_examples=40, deadline=None)
@given(pairs=st.lists(st.integers(0, 31), min_size=1, max_size=70), theta=st.sampled_from([1e4, 5e5, 1e7]))
def test_any_list_of_frequencies_comes_back(pairs: list[int], theta: float) -> None:
    source = {"rope_type": "default", "rope_theta": theta}
    rotary = from_config(tiny_config("llama", head_dim=64, rope_parameters=source), 64).select(pairs, "interleaved")
    _, back = written(rotary, rope_parameters=source)
    torch.testing.assert_close(back.frequencies, rotary.frequencies, rtol=1e-6, atol=0)
    assert back.attention_factor == 1.0
    long = back.frequencies if back.long_frequencies is None else back.long_frequencies
    torch.testing.assert_close(long, rotary.frequencies, rtol=1e-6, atol=0)


@settings(max_examples=20, deadline=None)
@given(pairs=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_both_lists_of_longrope_come_back_and_where_they_change(pairs: list[int]) -> None:
    frequencies = torch.tensor([1.0, 0.1, 0.03, 0.0002], dtype=torch.float64)
    rotary = Rotary(frequencies, "half", 1.3, frequencies / 7, 50).select(pairs, "interleaved")
    _, back = written(rotary)
    torch.testing.assert_close(back.frequencies, rotary.frequencies, rtol=1e-6, atol=0)
    assert back.long_frequencies is not None
    assert rotary.long_frequencies is not None
    torch.testing.assert_close(back.long_frequencies, rotary.long_frequencies, rtol=1e-6, atol=0)
    assert (back.long_beyond, back.attention_factor) == (50, 1.0)


def test_a_config_has_nothing_of_the_source_but_what_both_classes_know() -> None:
    config = tiny_config("mistral", sliding_window=128)
    raw = {"dtype": "bfloat16", "sliding_window": 128, "own_key": 5, "model_type": "mistral", "architectures": ["M"]}
    target = AttentionSpec.from_config(config).latent(16, 8)
    found = DEEPSEEK.config(raw, FAMILIES[config.model_type].of(config), target, None)
    assert "rope_parameters" not in found, "only sizes are wanted"
    assert not {"sliding_window", "own_key"} & found.keys()
    assert (found["model_type"], found["architectures"], found["dtype"]) == (
        "deepseek_v3", ["TransformersForCausalLM"], "bfloat16",
    )  # fmt: skip
    sized = DEEPSEEK.sized(raw, FAMILIES[config.model_type].of(config), target)
    assert AttentionSpec.from_config(sized) == target
    assert FAMILIES["deepseek_v3"].of(sized).unreadable is None, "what is written can be read"


def test_query_biases_go_through_the_latent_of_queries() -> None:
    biased = (("qwen2", {}), ("llama", {"attention_bias": True}))
    for model_type, changes in (*biased, ("llama", {})):
        family = FAMILIES[model_type].of(tiny_config(model_type, **changes))
        target, through = family.spec.latent(16, 8), (model_type, changes) != ("llama", {})
        assert DEEPSEEK.refuses(family, target) is None
        sized = DEEPSEEK.sized({}, family, target)
        assert sized.q_lora_rank == (80 if through else None)
        assert FAMILIES["deepseek_v3"].of(sized).unreadable is None
        note = "query biases go through q_a_proj, an identity with a constant: 64 × 80 more weights in each layer"
        assert DEEPSEEK.notes(family) == ((note,) if through else ())


PREFIX = "model.layers.0.self_attn."


def normalised(channels: int) -> FactoredAttention:
    a = factored(4, 6, 4, channels, 20, biased=False)
    ladder = Rotary(0.3 ** torch.arange(4, dtype=torch.float64), "interleaved")
    gain = 2 * torch.rand(channels, generator=torch.Generator().manual_seed(5)) + 0.1
    return dataclasses.replace(a, normalised=True, gain=gain, rotary=ladder)


@pytest.mark.parametrize(
    ("host", "rank", "channels", "biased"),
    [
        *((DEEPSEEK, *row, biased) for row in ((16, 15), (16, 9), (15, 13)) for biased in (True, False)),
        *((PORTABLE, 16, channels, False) for channels in (16, 9)),
    ],
)
def test_the_stock_module_computes_the_record(host: Host, rank: int, channels: int, biased: bool) -> None:
    """Constants, padding, scale and biases: the class's own attention against the naive reference."""
    a = normalised(channels) if host.portable else factored(4, 6, 4, channels, 20, biased)
    a = dataclasses.replace(a, q_nope_bias=None, q_rope_bias=None)
    sizes = {"num_attention_heads": 4, "hidden_size": 20, "head_dim": 6, "num_key_value_heads": 4}
    source = family_of("llama").of(tiny_config("llama", **sizes))
    target = source.spec.latent(rank, 8)
    config = type(tiny_config("deepseek_v3"))(**host.config({}, source, target, a.rotary), attn_implementation="eager")
    tensors, sized = host.layout(source).join(a, target, 0), host.sized({}, source, target)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == host.layout(source).of(sized).shapes(0)
    if host.portable:
        assert not any(name.endswith("bias") for name in tensors)
    else:
        own = len(constants(rank))
        norm, up = (tensors[f"{PREFIX}{name}.weight"] for name in ("kv_a_layernorm", "kv_b_proj"))
        assert norm.tolist() == [level(constants(rank))] * (rank - own) + [0.0] * own, "constants are cached as zeros"
        assert up[:, channels:].abs().max() == 0, "and nothing reads them"
    stock_module_computes(config, tensors, a)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
def test_latents_are_so_large_that_the_norms_epsilon_does_not_matter(eps: float) -> None:
    """Engines take it from the config, and transformers does not."""
    a, x = normalised(9), torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    a = dataclasses.replace(a, down=a.down / (x @ a.down.T).norm(dim=-1).mean())
    tensors = V3.join(a, AttentionSpec(1, 4, 4, 6, 16, 8, 6), 0)
    down, gain = tensors[f"{PREFIX}kv_a_proj_with_mqa.weight"][:16], tensors[f"{PREFIX}kv_a_layernorm.weight"]
    made = torch.nn.functional.rms_norm(x @ down.T, (16,), gain, eps)
    torch.testing.assert_close(made[:, :9], 4 * a.latent(x), rtol=1e-5, atol=1e-5)  # √16, which the reader divides by


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("pairs", [[0], [0, 1], [0, 31], list(range(32)), list(range(0, 32, 2)), [0, 5, 10]], ids=str)
def test_a_ladder_is_written_as_yarn_that_changes_nothing(pairs: list[int], theta: float) -> None:
    source = tiny_config("llama", head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": theta})
    rotary = from_config(source, 64).select(pairs, "interleaved")
    family = family_of("llama").of(source)
    found = PORTABLE.config({}, family, family.spec.latent(16, rotary.dims), rotary)
    assert found["rope_parameters"]["rope_type"] == "yarn"
    made = tiny_config(
        "deepseek_v3", qk_rope_head_dim=rotary.dims, head_dim=rotary.dims, rope_parameters=found["rope_parameters"]
    )
    back = from_config(made, rotary.dims, "interleaved")
    torch.testing.assert_close(back.frequencies, rotary.frequencies, rtol=1e-5, atol=0)
    assert back.attention_factor == 1
    assert V3.of(made).scale == pytest.approx(made.qk_head_dim**-0.5)


@pytest.mark.parametrize(
    ("frequencies", "ratio"),
    [
        *((no, None) for no in ([1.0, 0.5, 0.3], [0.5, 0.25], [2.0], [1.0, 0.1, 0.01, 0.0011])),
        ([1.0, 0.5, 0.25], 0.5),
        ([1.0], 1),
    ],
)
def test_a_ladder_has_one_ratio(frequencies: list[float], ratio: float | None) -> None:
    found = ladder_ratio(Rotary(torch.tensor(frequencies).double(), "half"))
    assert found is ratio or found == pytest.approx(ratio)


@pytest.mark.parametrize(("layers", "q_lora_rank"), [(2, 4096), (48, 4096), (26, None), (27, None)])
def test_llama_cpp_wants_a_latent_of_queries_save_at_26_and_27_layers(layers: int, q_lora_rank: int | None) -> None:
    """Its loader reads that latent's rank except at these."""
    spec = dataclasses.replace(AttentionSpec(layers, 32, 32, 128).latent(96, 32), q_lora_rank=q_lora_rank)
    assert running(PORTABLE, FAMILIES["llama"], spec) == ["transformers", "llama.cpp"]
    assert running(PORTABLE, FAMILIES["mistral"], spec) == ["transformers"], "not tried"
    other = dataclasses.replace(spec, q_lora_rank=None if q_lora_rank else 4096)
    assert running(PORTABLE, FAMILIES["llama"], other) == ["transformers"]
    whether = "with" if q_lora_rank else "without"
    said = ENGINES["llama.cpp"].objection(PORTABLE, FAMILIES["llama"], other)
    assert said == f"llama.cpp takes models of {layers} layers {whether} a latent of queries"


SIZE = ("--kv-lora-rank", 40, "--qk-rope-head-dim", 8)


def logits_on(text: Path, model: Path) -> torch.Tensor:
    return logits_of(model, AutoTokenizer.from_pretrained(model)(text.read_text(), return_tensors="pt")["input_ids"][:, :128])


@pytest.mark.parametrize("tied", rows([True, False], [True]))
def test_a_result_is_deepseeks_own_and_close_to_the_source(
    tied: bool, checkpoint: Make, convert: Any, words: Path, tmp_path: Path
) -> None:
    """A latent of all of the input can have a constant norm, because the input has."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    source = checkpoint("llama", tie_word_embeddings=tied, **sizes)
    size = ("--kv-lora-rank", 65, "--qk-rope-head-dim", 64)
    said = ok(
        convert("mla", source, tmp_path / "out", "--portable", *size, "--text", words, "--calibration-tokens", 1024)
    ).stdout
    assert "64 of 65 latent channels carry keys and values; one makes the norm of latents nearly constant" in said
    raw, tensors = json.loads((tmp_path / "out" / "config.json").read_text()), weights(tmp_path / "out")
    assert (raw["architectures"], raw["model_type"]) == (["DeepseekV3ForCausalLM"], "deepseek_v3")
    assert (raw["attention_bias"], raw["rope_parameters"]["rope_type"]) == (False, "yarn")
    assert not any(name.endswith("bias") for name in tensors)
    same = torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert same == tied, "engines expect a head of its own"
    assert raw["tie_word_embeddings"] is False, "or copies that transformers saves lack it"
    expected, found = (logits_on(words, path) for path in (source, tmp_path / "out"))
    assert (expected - found).square().mean() < 1e-3 * expected.var()


def test_it_decodes_with_the_latent_alone_and_is_saved_again(
    checkpoint: Make, convert: Any, logits: Any, words: Path, tmp_path: Path
) -> None:
    source = checkpoint(num_hidden_layers=2, tie_word_embeddings=True)
    ok(convert("mla", source, tmp_path / "out", "--portable", *SIZE, "--text", words, "--calibration-tokens", 1024, "-q"))
    assert "MLA-40+8" in ok(convert("inspect", tmp_path / "out")).stdout
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    stock.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(tmp_path / "again"), logits(tmp_path / "out"), rtol=0, atol=0)
    assert "lm_head.weight" in weights(tmp_path / "again")
    ids, options = torch.tensor([[5, 9, 30, 40]]), {"max_new_tokens": 12, "do_sample": False}
    fast = attention.load(str(tmp_path / "out"))
    assert fast.generate(ids, **options).tolist() == stock.generate(ids, **options).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*SIZE], "--portable needs calibration text"),
        ([*SIZE, "--text", "TEXT", "--no-refit"], "--portable needs the refit"),
        ([*SIZE, "--text", "TEXT", "--method", "svd"], "method svd has no use for it"),
        ([*SIZE, "--text", "TEXT", "--method", "svd", "--refit"], "method svd has no use for it"),
        (
            ["--kv-lora-rank", 40, "--qk-rope-head-dim", 16, "--text", "TEXT"],
            "a portable result keeps each of its 4 frequencies once",
        ),
        (["--kv-lora-rank", 40, "--qk-rope-head-dim", 6, "--text", "TEXT", "--method", "pca"], "not a geometric ladder"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[Any], message: str, checkpoint: Make, convert: Any, words: Path, tmp_path: Path
) -> None:
    given = [words if option == "TEXT" else option for option in options]
    result = convert("mla", checkpoint(), tmp_path / "out", "--portable", *given)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("dtype", rows(["float32", "bfloat16"], ["float32"]))
def test_queries_behind_a_norm_of_their_own_are_the_same(
    dtype: str, checkpoint: Make, convert: Any, logits: Any, words: Path, tmp_path: Path
) -> None:
    options = ("--portable", *SIZE, "--text", words, "--calibration-tokens", 1024, "--dtype", dtype, "-q")
    source = checkpoint(num_hidden_layers=2)
    ok(convert("mla", source, tmp_path / "plain", *options))
    ok(convert("mla", source, tmp_path / "out", *options, "--engine", "llama.cpp"))
    raw, tensors = json.loads((tmp_path / "out" / "config.json").read_text()), weights(tmp_path / "out")
    assert (raw["q_lora_rank"], raw["n_group"], raw["topk_group"]) == (64, None, None)
    down = tensors[f"{PREFIX}q_a_proj.weight"].float()
    gain = weights(source)["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(down.diag(), 1 / gain, rtol=2**-8, atol=0)
    assert torch.equal(down, down.diag().diag())
    assert torch.equal(down, down.bfloat16().float()), "exact in every dtype"
    assert not any(name.endswith("q_proj.weight") for name in tensors)
    expected, found = logits(tmp_path / "plain"), logits(tmp_path / "out")
    if dtype == "float32":
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 * float(expected.std()))
    else:  # of two roundings of the same weights, each is as near to what was rounded
        exact = tmp_path / "exact"
        ok(convert("mla", source, exact, *options[:-2], "float32", "-q"))
        one, other = ((rounded - logits(exact)).square().mean() for rounded in (found, expected))
        assert one < 2 * other
    assert "MLA-40+8" in ok(convert("inspect", tmp_path / "out")).stdout
    card = (tmp_path / "out" / "README.md").read_text()
    assert "convert_hf_to_gguf.py" in card
    assert "convert_hf_to_gguf.py" not in (tmp_path / "plain" / "README.md").read_text()


def test_what_another_norm_of_queries_would_undo_is_refused(
    checkpoint: Make, convert: Any, logits: Any, words: Path, tmp_path: Path
) -> None:
    """Embeddings so small that the norm's epsilon leaves tokens of different sizes. A channel without a gain does no harm."""
    source = checkpoint(num_hidden_layers=2, vocab_size=96)
    options = ("--portable", *SIZE, "--text", words, "--calibration-tokens", 1024, "-q")
    embeddings, gains = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"
    sizes = torch.linspace(1e-3, 1e-2, 96)[:, None]
    damage(source, lambda tensors: tensors[embeddings].mul_(sizes))
    result = convert("mla", source, tmp_path / "out", *options, "--engine", "llama.cpp")
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert re.search(r"behind the norm of layer 0's input, tokens differ in size by \d+\.\d% .* at most 2% is allowed", said)
    assert "leave out --engine llama.cpp" in said

    damage(source, lambda tensors: (tensors[embeddings].div_(sizes), tensors[gains][5].zero_()))
    for name, more in (("with", ("--engine", "llama.cpp")), ("without", ())):
        ok(convert("mla", source, tmp_path / name, *options, *more))
    expected = logits(tmp_path / "without")
    assert (logits(tmp_path / "with") - expected).square().mean() < 1e-3 * expected.var()


def test_a_ladder_is_written_as_it_was_made(
    checkpoint: Make, convert: Any, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result's attention outputs differ from the source's as much as the conversion measured, and no more."""
    source = checkpoint("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=64)
    options = ("--kv-lora-rank", 65, "--qk-rope-head-dim", 32, "--text", words, "--calibration-tokens", 1024, "-q")
    monkeypatch.setattr("convert.methods.weighted.pairs_on_ladder", lambda losses, count: tuple(range(0, 2 * count, 2)))
    ok(convert("mla", source, tmp_path / "out", "--portable", *options))
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert provenance["rotary_frequencies"] == [2 * i for i in range(16)]
    theta = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]["rope_theta"]
    assert theta == pytest.approx(1e4)
    expected = logits_on(words, source)
    assert float((logits_on(words, tmp_path / "out") - expected).square().mean() / expected.var()) < 0.3


def test_a_budget_leaves_one_key_per_frequency(checkpoint: Make, convert: Any, words: Path, tmp_path: Path) -> None:
    source = checkpoint("llama", num_key_value_heads=8)
    asked = ("--portable", "--kv-budget", "100%", "--text", words, "--dry-run", "--json")
    plan = json.loads(ok(convert("mla", source, tmp_path / "out", *asked)).stdout)
    assert plan["qk_rope_head_dim"] <= 8
