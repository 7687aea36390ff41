"""Models and a text in, a report out: the contract of DESIGN.md §8, what is refused, and where a model may lie."""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY
from transformers import AutoModelForCausalLM
from written import Make, damage, edit, without_tokenizer

from attention.errors import Failure, KvfoldError, Refusal
from eval.inputs.loading import load, tokens_of
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.quality.evaluation import check, report_of
from eval.quality.settings import EvaluationSettings

TEXT = Text("novel.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 5)
SHORT = EvaluationSettings(contexts=(32,), device="cpu")
SIZE = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "q_lora_rank": None}  # of a latent


@pytest.fixture
def pair(checkpoint: Make) -> list[Source]:
    """A source of 4 KV heads kept in fp32, and a model of 2 kept in bf16."""
    small = edit(checkpoint(name="small", num_key_value_heads=2), dtype="bfloat16")
    return [Source.parse(str(checkpoint())), Source.parse(str(small))]


def forget_weights(*sources: Source) -> None:
    """From here on, whoever reads weights fails otherwise than with a refusal."""
    for source in sources:
        (source.files / "model.safetensors").write_bytes(b"no weights")


NUMBERS: dict[str, type] = {
    **dict.fromkeys(("perplexity", "loss_nats", "bits_per_byte", "kl_to_source", "top1_agreement", "acceptance"), float),
    **dict.fromkeys(("kv_bytes_measured", "cache_ratio"), float),
    **dict.fromkeys(("tokens", "kv_bytes_per_token"), int),
}
WORDS = {"name", "path", "kind", "cache_dtype", "cache_format", "method", "code", "calibration_hash", "calibration_context"}


def test_the_report_keeps_its_contract(pair: list[Source]) -> None:
    report = json.loads(json.dumps(report_of(pair, TEXT, SHORT), allow_nan=False))
    assert set(report) == {"kvfold", "protocol", "models", "other_contexts", "probes"}
    sizes = {"context": 32, "stride": 32, "tokens": len(TEXT.text), "bytes_in_text": len(TEXT.text)}
    words = {"name": "paper", "bos": "start", "dtype": "float32", "text": "novel.txt"}
    assert report["protocol"] == {**sizes, **words, "text_hash": report["protocol"]["text_hash"]}
    assert report["protocol"]["text_hash"].startswith("sha256:")
    assert len(report["models"]) == 2
    for entry in report["models"]:
        assert WORDS | {"remarks", "calibration_overlap"} | set(NUMBERS) == set(entry)
        for key, kind in NUMBERS.items():
            assert type(entry[key]) is kind, key
            assert math.isfinite(entry[key]), key


def test_a_model_is_compared_with_the_first_whatever_else_is_there(pair: list[Source], checkpoint: Make) -> None:
    copy = Source.parse(str(checkpoint(name="copy")))
    source, converted, same = report_of([*pair, copy], TEXT, SHORT)["models"]
    assert [source, converted] == report_of(pair, TEXT, SHORT)["models"]
    assert [source] == report_of(pair[:1], TEXT, SHORT)["models"]
    assert (source["name"], source["path"], source["kind"]) == ("source", pair[0].reference, "GQA-4")
    assert (source["kl_to_source"], source["top1_agreement"], source["loss_nats"], source["cache_ratio"]) == (0, 1, 0, 1)
    assert (converted["name"], converted["path"], converted["kind"]) == ("small", pair[1].reference, "GQA-2")
    assert converted["kl_to_source"] > 0
    assert converted["top1_agreement"] < 1
    assert converted["loss_nats"] == pytest.approx(math.log(converted["perplexity"] / source["perplexity"]))
    assert source["tokens"] == converted["tokens"] == len(TEXT.text) // 32 * 31
    assert (same["kl_to_source"], same["top1_agreement"], same["perplexity"]) == (0, 1, source["perplexity"])
    # At each checkpoint's own dtype.
    assert (source["cache_dtype"], source["kv_bytes_per_token"], source["kv_bytes_measured"]) == ("float32", 768, 768)
    assert (converted["cache_dtype"], converted["kv_bytes_per_token"], converted["kv_bytes_measured"]) == ("bfloat16", 192, 192)
    assert converted["cache_ratio"] == 0.25


def test_each_model_is_evaluated_over_caches_in_each_format(pair: list[Source]) -> None:
    settings = replace(SHORT, contexts=(64, 32), cache_dtypes=("int8", "int2", "bfloat16"))
    report = report_of(pair, TEXT, settings)
    assert [entry["cache_format"] for entry in report["models"]] == [None, None, "int8", "int2", "bfloat16", "int8", "int2"]
    rows = [(entry["name"], entry["cache_dtype"]) for entry in report["models"]]
    assert rows == [
        ("source", "float32"), ("small", "bfloat16"),
        ("source (int8 cache)", "int8"), ("source (int2 cache)", "int2"), ("source (bfloat16 cache)", "bfloat16"),
        ("small (int8 cache)", "int8"), ("small (int2 cache)", "int2"),  # its dtype is bfloat16
    ]  # fmt: skip
    source, small, int8, int2, half, *_ = report["models"]
    plain = report_of(pair, TEXT, replace(SHORT, contexts=(64, 32)))["models"]
    assert [source, small] == plain
    assert 0 < int8["kl_to_source"] < int2["kl_to_source"]
    assert half["kl_to_source"] < int8["kl_to_source"]
    assert int8["kv_bytes_per_token"] == int8["kv_bytes_measured"] == 3 * 2 * 4 * (8 + 4)
    assert int2["kv_bytes_per_token"] == int2["kv_bytes_measured"] == 3 * 2 * 4 * (2 + 4)
    assert int2["cache_ratio"] == int2["kv_bytes_per_token"] / source["kv_bytes_per_token"]
    (shorter,) = report["other_contexts"]
    assert [entry["name"] for entry in shorter["models"]] == [name for name, _ in rows]
    assert shorter["models"][3]["loss_nats"] != 0
    assert {0 < entry["acceptance"] <= 1 for entry in report["models"]} == {True}
    assert source["acceptance"] == 1


def test_an_engines_format_rounds_heads_and_says_that_its_bytes_are_by_formula(pair: list[Source], checkpoint: Make) -> None:
    latent = Source.parse(str(checkpoint(name="latent", model_type="deepseek_v3", **SIZE)))
    settings = replace(SHORT, contexts=(64,), cache_dtypes=("int4_per_token_head",))
    *plain, served = report_of([pair[0], latent], TEXT, settings)["models"]
    assert [entry["name"] for entry in (*plain, served)] == ["source", "latent", "source (int4_per_token_head cache)"]
    assert (served["cache_format"], served["kv_bytes_measured"]) == ("int4_per_token_head", None)
    assert served["kv_bytes_per_token"] == 3 * 4 * 2 * (8 // 2 + 4)
    assert served["kl_to_source"] > 0
    (remark,) = served["remarks"]
    assert remark.startswith("rounds as vLLM 0.33 does with --kv-cache-dtype int4_per_token_head, ")
    with pytest.raises(Refusal, match="int4_per_token_head is for heads, and all of these models cache latents"):
        report_of([latent], TEXT, settings)


def test_a_format_of_classes_is_for_latents_that_were_made_for_it(checkpoint: Make) -> None:
    source, plain, ordered = (
        Source.parse(str(checkpoint(name=name, model_type=kind, **options)))
        for name, kind, options in (("source", "llama", {}), ("plain", "deepseek_v3", SIZE), ("ordered", "deepseek_v3", SIZE))
    )
    made = {"kvfold": "0", "kv_bytes_per_token": {"before": 2, "after": 1, "cache_dtype": "mixed"}}
    (ordered.files / "conversion.json").write_text(json.dumps(made))
    report = report_of([source, plain, ordered], TEXT, replace(SHORT, cache_dtypes=("mixed",)))
    assert [entry["name"] for entry in report["models"]] == ["source", "plain", "ordered", "ordered (mixed cache)"]


# What configs and settings show before weights are read: changes of the second model's config, and of the settings.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a context of 1 predicts nothing": ({}, {"contexts": (1,)}),
    "a context of 65 tokens exceeds the 64 positions of the model": ({"max_position_embeddings": 64}, {"contexts": (65,)}),
    f"models with different vocabularies cannot be compared: source {VOCABULARY}, small 97": (
        {"vocab_size": 97, "pad_token_id": 0},
        {},
    ),
    "no KV cache is kept in 'float8_e4m3fn'": ({"dtype": "float8_e4m3fn"}, {}),
    "no KV cache is kept in 'int5'": ({}, {"cache_dtypes": ("int5",)}),
    "small: a head of 4 values cannot be cached in int4": ({"head_dim": 4}, {"cache_dtypes": ("int4",)}),
    "source: a head of 8 values cannot be cached in nvfp4": ({}, {"cache_dtypes": ("nvfp4",)}),
    "none of the models was made for a cache in mixed": ({}, {"cache_dtypes": ("mixed",)}),
    "no device 'gpu' (choose auto, cpu, cuda or cuda:N)": ({}, {"device": "gpu"}),
    "device 'mps' is not supported (choose auto, cpu, cuda or cuda:N)": ({}, {"device": "mps"}),
    "this machine has no device 'cuda:99'": ({}, {"device": "cuda:99"}),
    "small is not a decoder-only language model (model type 't5')": ({"model_type": "t5"}, {}),
    "small is not a decoder-only language model (model type 'vit')": ({"model_type": "vit"}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_configs_and_settings_are_refused_before_weights_are_read(message: str, pair: list[Source]) -> None:
    changes, settings = REFUSED[message]
    edit(pair[1].files, **changes)
    forget_weights(*pair)
    with pytest.raises(KvfoldError) as caught:
        report_of(pair, TEXT, replace(SHORT, **settings))
    assert message in str(caught.value)


@pytest.mark.parametrize(("limits", "context"), [((4096, 4096), 2048), ((4096, 64), 64), ((64, 4096), 64)])
def test_the_context_is_what_all_models_allow(pair: list[Source], limits: tuple[int, int], context: int) -> None:
    for source, limit in zip(pair, limits, strict=True):
        edit(source.files, max_position_embeddings=limit)
    assert check(pair, EvaluationSettings())[0].context == context
    assert check(pair, EvaluationSettings(contexts=(64,)))[0].context == 64


K = "model.layers.1.self_attn.k_proj.weight"
DAMAGE: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    rf"small lacks 1 of its model's weights altogether: {K}": lambda tensors: tensors.pop(K),
    rf"small: config.json and the weights disagree: {K} is \[8, 64\]": lambda t: t.update({K: t[K][:8].clone()}),
    rf"{K} of .*small is stored as I16": lambda t: t.update({K: t[K].to(torch.int16)}),
    rf"{K} of .*small is stored as F8_E4M3": lambda t: t.update({K: t[K].to(torch.float8_e4m3fn)}),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_weights_that_are_not_the_models_fail_instead_of_being_random(message: str, pair: list[Source]) -> None:
    damage(pair[1].files, DAMAGE[message])
    with pytest.raises(Failure, match=message), load(pair[1], device="cpu"):
        pass


def test_files_that_lack_or_are_damaged_fail_with_their_model(pair: list[Source], checkpoint: Make) -> None:
    forget_weights(pair[1])
    with pytest.raises(Failure, match=f"cannot load {pair[1].reference}: "):
        report_of(pair, TEXT, SHORT)
    without_tokenizer(pair[0].files)
    with pytest.raises(Failure, match=f"cannot load the tokenizer of {pair[0].reference}: "):
        report_of(pair, TEXT, SHORT)
    few = Source.parse(str(checkpoint(vocab_size=50)))
    with pytest.raises(Failure, match=r"the tokenizer of .*source makes ids up to \d+, its model knows 50"):
        tokens_of(few, TEXT)


def test_only_so_many_tokens_are_evaluated_and_each_context_as_if_alone(pair: list[Source]) -> None:
    report = report_of(pair, TEXT, replace(SHORT, max_tokens=64, contexts=(32, 16)))
    begun = report_of(pair, Text("novel.txt", TEXT.text[:64]), replace(SHORT, contexts=(16,)))
    assert report["protocol"]["tokens"] == 64
    assert report["protocol"]["text_hash"] == begun["protocol"]["text_hash"] != tokens_of(pair[0], TEXT).hash
    assert [entry["tokens"] for entry in report["models"]] == [62, 62]
    assert report | {"other_contexts": []} == report_of(pair, TEXT, replace(SHORT, max_tokens=64))
    (other,) = report["other_contexts"]
    assert (other["context"], other["stride"]) == (16, 16)
    for found, expected in zip(other["models"], begun["models"], strict=True):
        assert found.items() <= expected.items()
        assert {"name", "perplexity", "loss_nats", "kl_to_source"} <= set(found)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_models_run_in_the_dtype_asked_for_and_in_fp32_on_a_cpu(
    pair: list[Source], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, asked = AutoModelForCausalLM.from_pretrained, []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **how: asked.append(how) or whole(*a, **how))
    with load(pair[1], dtype, "cpu") as model:
        assert model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        assert not model.training
    assert "device_map" not in asked[0], "on a CPU it is loaded whole"


ON_DISK = ("model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb", "lm_head")
PLACEMENTS: dict[str, dict[str, str]] = {
    "last layers and head on disk": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", **dict.fromkeys(ON_DISK, "disk")},
    "embedding on disk": {
        "model.embed_tokens": "disk", "lm_head": "cpu",
        **dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb"), "cpu"),
    },
}  # fmt: skip


@pytest.mark.parametrize(("placement", "tied"), [("last layers and head on disk", False), ("embedding on disk", True)])
def test_a_model_spread_by_a_device_map_scores_as_one_in_memory(
    checkpoint: Make, placement: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source.parse(str(checkpoint(tie_word_embeddings=tied)))
    small = Source.parse(str(checkpoint(name="small", num_key_value_heads=2, tie_word_embeddings=tied)))
    expected = report_of([source, small], TEXT, SHORT)
    whole, placed, places = AutoModelForCausalLM.from_pretrained, [], dict(PLACEMENTS[placement])
    if tied and "lm_head" in places:
        places["lm_head"] = places["model.embed_tokens"]  # as accelerate's own maps keep tied weights together

    def spread(*arguments: Any, device_map: str, offload_folder: str, **options: Any) -> Any:
        placed.append((device_map, Path(offload_folder).is_dir()))
        return whole(*arguments, device_map=places, offload_folder=offload_folder, **options)

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    # There need be no GPU for the path that one would open: accelerate computes on the CPU what lies on disk.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spread)
    found = report_of([source, small], TEXT, replace(SHORT, device="auto"))
    assert placed == [("auto", True), ("auto", True)]
    assert not list((tmp_path / "temporary").iterdir())
    for ours, theirs in zip(found["models"], expected["models"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == (pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value), key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_a_gpu_scores_as_a_cpu_does(pair: list[Source], device: str) -> None:
    on_gpu = report_of(pair, TEXT, replace(SHORT, dtype="float32", device=device))
    on_cpu = report_of(pair, TEXT, replace(SHORT, dtype="float32"))
    for ours, theirs in zip(on_gpu["models"], on_cpu["models"], strict=True):
        assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-3)
