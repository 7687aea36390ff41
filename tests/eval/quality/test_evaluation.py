"""Models and a text in, a report out: the contract of DESIGN.md §8, what is refused, and where a model may lie."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY
from written import Make

from attention.errors import Failure, GateMissed, Refusal
from eval.inputs.loading import load, tokens_of
from eval.inputs.overlap import overlap
from eval.inputs.reader import fingerprint
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.quality import evaluation as module
from eval.quality import lockstep
from eval.quality.evaluation import check, report_of, require_ratio
from eval.quality.settings import EvaluationSettings

TEXT = Text("novel.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 5)
SHORT = EvaluationSettings(contexts=(32,), device="cpu")
SIZE = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "q_lora_rank": None}  # of a latent


@pytest.fixture
def pair(checkpoint: Make) -> list[Source]:
    """A source of 4 KV heads kept in fp32, and a model of 2 kept in bf16."""
    small = checkpoint(name="small", num_key_value_heads=2)
    rewrite(small, dtype="bfloat16")
    return [Source.parse(str(checkpoint())), Source.parse(str(small))]


def rewrite(path: Path, **changes: Any) -> None:
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")


def forget_weights(source: Source) -> None:
    """From here on, whoever reads weights fails otherwise than with a refusal."""
    assert source.directory is not None
    (source.directory / "model.safetensors").write_bytes(b"no weights")


NUMBERS: dict[str, type] = {
    "perplexity": float,
    "loss_nats": float,
    "bits_per_byte": float,
    "tokens": int,
    "kl_to_source": float,
    "top1_agreement": float,
    "acceptance": float,
    "kv_bytes_per_token": int,
    "kv_bytes_measured": float,
    "cache_ratio": float,
}


def test_the_report_keeps_its_contract(pair: list[Source]) -> None:
    report = json.loads(json.dumps(report_of(pair, TEXT, SHORT), allow_nan=False))
    assert set(report) == {"kvfold", "protocol", "models", "other_contexts", "recall"}
    assert report["protocol"] == {
        "name": "paper",
        "context": 32,
        "stride": 32,
        "bos": "start",
        "dtype": "float32",
        "text": "novel.txt",
        "text_hash": report["protocol"]["text_hash"],
        "tokens": len(TEXT.text),
        "bytes_in_text": len(TEXT.text),
    }
    assert report["protocol"]["text_hash"].startswith("sha256:")
    assert len(report["models"]) == 2
    for entry in report["models"]:
        calibration = {f"calibration_{key}" for key in ("hash", "context", "overlap")}
        others = {
            "name",
            "path",
            "kind",
            "cache_dtype",
            "cache_format",
            "method",
            "loss_by_position",
            "code",
            "remarks",
        } | calibration
        assert others | set(NUMBERS) == set(entry)
        (place,) = entry["loss_by_position"]
        assert place == {"from": 0, "to": 128, "tokens": entry["tokens"], "loss_nats": pytest.approx(entry["loss_nats"])}
        for key, kind in NUMBERS.items():
            assert type(entry[key]) is kind, key
            assert math.isfinite(entry[key]), key


def test_the_source_comes_first_and_is_at_no_distance_from_itself(pair: list[Source]) -> None:
    source, converted = report_of(pair, TEXT, SHORT)["models"]
    assert (source["name"], source["path"], source["kind"]) == ("source", pair[0].reference, "GQA-4")
    assert (source["kl_to_source"], source["top1_agreement"], source["loss_nats"], source["cache_ratio"]) == (0, 1, 0, 1)
    assert (converted["name"], converted["path"], converted["kind"]) == ("small", pair[1].reference, "GQA-2")
    assert converted["kl_to_source"] > 0
    assert converted["top1_agreement"] < 1
    assert converted["loss_nats"] == pytest.approx(math.log(converted["perplexity"] / source["perplexity"]))
    assert source["tokens"] == converted["tokens"] == len(TEXT.text) // 32 * 31


def test_caches_are_counted_at_the_checkpoints_own_dtype(pair: list[Source]) -> None:
    source, converted = report_of(pair, TEXT, SHORT)["models"]
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


def test_kivi_rounds_heads_and_says_that_its_bytes_are_by_formula(pair: list[Source], checkpoint: Make) -> None:
    latent = Source.parse(str(checkpoint(name="latent", model_type="deepseek_v3", **SIZE)))
    settings = replace(SHORT, contexts=(64,), cache_dtypes=("kivi2",))
    *plain, kivi = report_of([pair[0], latent], TEXT, settings)["models"]
    assert [entry["name"] for entry in (*plain, kivi)] == ["source", "latent", "source (kivi2 cache)"]
    assert (kivi["cache_format"], kivi["kv_bytes_measured"]) == ("kivi2", None)
    assert kivi["kv_bytes_per_token"] == 3 * 4 * (8 * (2 + 1) // 8 + 2 + 4)  # keys, values
    assert kivi["kl_to_source"] > 0
    (remark,) = kivi["remarks"]
    assert "its bytes are by formula: a real KIVI cache keeps the keys of the newest tokens as they are" in remark
    with pytest.raises(Refusal, match="none of the models has keys of heads, which kivi2 groups"):
        report_of([latent], TEXT, settings)


def test_what_is_required_of_models_is_not_required_of_their_caches(pair: list[Source]) -> None:
    require_ratio(report_of(pair[:1], TEXT, replace(SHORT, contexts=(32, 16), cache_dtypes=("int2", "bfloat16"))), 0.5)
    named = replace(pair[1], label="small (bfloat16 cache)")  # a name shows nothing
    with pytest.raises(GateMissed):
        require_ratio(report_of([pair[0], named], TEXT, SHORT), 0.5)
    with pytest.raises(GateMissed):
        require_ratio(report_of(pair, TEXT, SHORT), 0.5)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("int5", "no KV cache is kept in 'int5'"),
        ("int4", "narrow: a head of 4 values cannot be cached in int4"),
        ("mixed", "none of the models was made for a cache in mixed"),
        ("kivi4", "narrow: a head of 4 values cannot be cached in kivi4"),
    ],
)
def test_formats_are_refused_before_weights_are_read(form: str, message: str, checkpoint: Make) -> None:
    narrow = Source.parse(str(checkpoint(name="narrow", head_dim=4)))
    forget_weights(narrow)
    with pytest.raises(Refusal, match=message):
        report_of([narrow], TEXT, replace(SHORT, cache_dtypes=(form,)))


def test_a_format_of_classes_is_for_latents_that_were_made_for_it(checkpoint: Make) -> None:
    source, plain, ordered = (
        Source.parse(str(checkpoint(name=name, model_type=kind, **options)))
        for name, kind, options in (("source", "llama", {}), ("plain", "deepseek_v3", SIZE), ("ordered", "deepseek_v3", SIZE))
    )
    made = {"kvfold": "0", "kv_bytes_per_token": {"before": 2, "after": 1, "cache_dtype": "mixed"}}
    (ordered.files / "conversion.json").write_text(json.dumps(made))
    report = report_of([source, plain, ordered], TEXT, replace(SHORT, cache_dtypes=("mixed",)))
    assert [entry["name"] for entry in report["models"]] == ["source", "plain", "ordered", "ordered (mixed cache)"]


def test_a_source_alone_scores_as_it_does_in_company(pair: list[Source]) -> None:
    (alone,) = report_of(pair[:1], TEXT, SHORT)["models"]
    assert alone == report_of(pair, TEXT, SHORT)["models"][0]


def test_every_model_is_compared_with_the_first(pair: list[Source], checkpoint: Make) -> None:
    third = Source.parse(str(checkpoint(name="third", num_key_value_heads=1)))
    report = report_of([*pair, third], TEXT, SHORT)
    assert [entry["name"] for entry in report["models"]] == ["source", "small", "third"]
    assert report["models"][1] == report_of(pair, TEXT, SHORT)["models"][1]
    assert report["models"][2] == report_of([pair[0], third], TEXT, SHORT)["models"][1]


def test_a_copy_of_the_source_is_at_no_distance(pair: list[Source], checkpoint: Make) -> None:
    source, copy = report_of([pair[0], Source.parse(str(checkpoint(name="copy")))], TEXT, SHORT)["models"]
    assert (copy["kl_to_source"], copy["top1_agreement"], copy["perplexity"]) == (0, 1, source["perplexity"])


def test_how_a_model_was_made_is_taken_from_its_own_provenance(pair: list[Source]) -> None:
    assert pair[1].directory is not None
    made = {"kvfold": "0.1.0", "method": "mean", "calibration_hash": "sha256:0"}
    (pair[1].directory / "conversion.json").write_text(json.dumps(made), encoding="utf-8")
    source, converted = report_of(pair, TEXT, SHORT)["models"]
    assert (source["method"], source["calibration_hash"]) == (None, None)
    assert (converted["method"], converted["calibration_hash"]) == ("mean", "sha256:0")


def test_only_so_many_tokens_are_evaluated(pair: list[Source]) -> None:
    report = report_of(pair, TEXT, replace(SHORT, max_tokens=64))
    assert report["protocol"]["tokens"] == 64
    assert [entry["tokens"] for entry in report["models"]] == [62, 62]
    assert report == report_of(pair, TEXT, replace(SHORT, max_tokens=64))
    begun = report_of(pair, Text("novel.txt", TEXT.text[:64]), SHORT)
    assert (
        report["protocol"]["text_hash"]
        == begun["protocol"]["text_hash"]
        != report_of(pair, TEXT, SHORT)["protocol"]["text_hash"]
    )
    assert report["models"][0]["perplexity"] == begun["models"][0]["perplexity"]


def test_each_context_is_evaluated_as_if_alone(pair: list[Source]) -> None:
    report = report_of(pair, TEXT, replace(SHORT, contexts=(32, 16)))
    alone = report_of(pair, TEXT, replace(SHORT, contexts=(16,)))
    assert report | {"other_contexts": []} == report_of(pair, TEXT, SHORT)
    (other,) = report["other_contexts"]
    require_ratio(report, 1000)
    perplexity = other["models"][1]["perplexity"]
    other["models"][1]["perplexity"] *= 2000
    with pytest.raises(GateMissed, match="at context 16, the limit is 1000"):
        require_ratio(report, 1000)
    other["models"][1]["perplexity"] = perplexity
    assert (other["context"], other["stride"]) == (16, 16)
    for found, expected in zip(other["models"], alone["models"], strict=True):
        assert found.items() <= expected.items()
        assert {"name", "perplexity", "loss_nats", "kl_to_source", "loss_by_position"} <= set(found)


@pytest.mark.parametrize("max_tokens", [1, 0, -3])
def test_too_few_tokens_are_refused(pair: list[Source], max_tokens: int) -> None:
    with pytest.raises(Refusal, match=f"perplexity needs at least 2 tokens, not {max_tokens}"):
        check(pair, EvaluationSettings(max_tokens=max_tokens))


@pytest.mark.parametrize(("limits", "context"), [((128, 128), 128), ((4096, 4096), 2048), ((4096, 64), 64), ((64, 4096), 64)])
def test_the_context_is_what_all_models_allow(pair: list[Source], limits: tuple[int, int], context: int) -> None:
    for source, limit in zip(pair, limits, strict=True):
        assert source.directory is not None
        rewrite(source.directory, max_position_embeddings=limit)
        forget_weights(source)
    assert check(pair, EvaluationSettings())[0].context == context


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_context_above_the_models_positions_is_refused_before_weights_are_read(pair: list[Source], shorter: int) -> None:
    directory = pair[shorter].directory
    assert directory is not None
    rewrite(directory, max_position_embeddings=64)
    for source in pair:
        forget_weights(source)
    with pytest.raises(Refusal, match="a context of 65 tokens exceeds the 64 positions of the model") as caught:
        report_of(pair, TEXT, EvaluationSettings(contexts=(65,)))
    assert caught.value.hint == "use --context 64 or less"
    assert check(pair, EvaluationSettings(contexts=(64,)))[0].context == 64


@pytest.mark.parametrize("context", [0, 1])
def test_a_context_that_predicts_nothing_is_refused(pair: list[Source], context: int) -> None:
    with pytest.raises(Refusal, match=f"a context of {context} predicts nothing"):
        check(pair, EvaluationSettings(contexts=(context,)))


def test_different_vocabularies_are_refused_before_weights_are_read(pair: list[Source]) -> None:
    assert pair[1].directory is not None
    rewrite(pair[1].directory, vocab_size=97, pad_token_id=0)
    for source in pair:
        forget_weights(source)
    with pytest.raises(Refusal, match=f"models with different vocabularies cannot be compared: source {VOCABULARY}, small 97"):
        report_of(pair, TEXT, SHORT)


def test_a_dtype_that_no_cache_is_kept_in_is_refused_before_weights_are_read(pair: list[Source]) -> None:
    assert pair[1].directory is not None
    rewrite(pair[1].directory, dtype="float8_e4m3fn")
    with pytest.raises(Refusal, match="no KV cache is kept in 'float8_e4m3fn'"):
        check(pair, SHORT)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "mps", "meta"])
def test_a_device_that_is_none_is_refused(pair: list[Source], device: str) -> None:
    with pytest.raises(Refusal, match=r"choose auto, cpu, cuda or cuda:N"):
        check(pair, EvaluationSettings(device=device))


def test_a_device_that_this_machine_lacks_fails(pair: list[Source]) -> None:
    with pytest.raises(Failure, match="this machine has no device 'cuda:99'"):
        check(pair, EvaluationSettings(device="cuda:99"))


def edit_weights(source: Source, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    assert source.directory is not None
    path = source.directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("broken", [0, 1])
def test_missing_weights_fail_instead_of_being_random(pair: list[Source], broken: int) -> None:
    edit_weights(pair[broken], lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(
        Failure, match=r"lacks 1 of its model's weights .* model\.layers\.1\.self_attn\.k_proj\.weight"
    ) as caught:
        report_of(pair, TEXT, SHORT)
    assert str(caught.value).startswith(pair[broken].reference)


def test_weights_of_another_shape_fail(pair: list[Source]) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_weights(pair[1], lambda tensors: tensors.update({name: tensors[name][:8].clone()}))
    with pytest.raises(Failure, match=r"small"):
        report_of(pair, TEXT, SHORT)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_fail(dtype: torch.dtype, pair: list[Source]) -> None:
    path = pair[1].files / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "q_proj" in name)
    save_file(tensors | {name: tensors[name].to(dtype)}, path, {"format": "pt"})
    with pytest.raises(Failure, match=rf"{name} of .*small is stored as [IF]\d"):
        report_of(pair, TEXT, SHORT)


def test_a_large_model_is_named_when_it_begins_to_load(
    pair: list[Source], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eval.inputs.loading._MOMENT", 0)
    with caplog.at_level(logging.INFO, "kvfold"), load(pair[1], device="cpu"):
        assert f"load {pair[1].name}: 0.0 GB" in caplog.messages


def test_a_damaged_file_fails_with_its_model(pair: list[Source]) -> None:
    forget_weights(pair[1])
    with pytest.raises(Failure, match=f"cannot load {pair[1].reference}: "):
        report_of(pair, TEXT, SHORT)


def test_a_checkpoint_without_a_tokenizer_fails_with_its_model(pair: list[Source]) -> None:
    assert pair[0].directory is not None
    for file in pair[0].directory.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(Failure, match=f"cannot load the tokenizer of {pair[0].reference}: "):
        report_of(pair, TEXT, SHORT)


def test_a_tokenizer_with_more_ids_than_the_model_has_fails(checkpoint: Make) -> None:
    source = Source.parse(str(checkpoint(vocab_size=50)))
    with pytest.raises(Failure, match=r"the tokenizer of .*source makes ids up to \d+, its model knows 50"):
        report_of([source], TEXT, SHORT)


def test_the_bos_protocol_needs_a_tokenizer_that_adds_one(pair: list[Source]) -> None:
    with pytest.raises(Failure, match="opens every block with a BOS token"):
        report_of(pair, TEXT, replace(SHORT, protocol="bos"))


def judged(**perplexities: float) -> dict[str, Any]:
    models = [{"name": name, "perplexity": value} for name, value in perplexities.items()]
    return {"protocol": {"context": 512}, "models": models, "other_contexts": []}


def test_a_model_above_the_limit_misses_the_gate() -> None:
    with pytest.raises(GateMissed, match=r"^perplexity of mqa is 1\.3 × that of source, the limit is 1\.2 ×$") as caught:
        require_ratio(judged(source=10.0, gqa=11.0, mqa=13.0), 1.2)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("limit", [None, 1.25, 5.0])
def test_a_model_within_the_limit_passes_the_gate(limit: float | None) -> None:
    require_ratio(judged(source=8.0, gqa=9.0, mqa=10.0), limit)


def test_a_source_alone_passes_every_gate() -> None:
    require_ratio(judged(source=8.0), 0.5)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_models_run_in_the_dtype_asked_for_and_in_fp32_on_a_cpu(pair: list[Source], dtype: str) -> None:
    with load(pair[1], dtype, "cpu") as model:
        assert model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        assert not model.training
    report = report_of(pair, TEXT, replace(SHORT, dtype=dtype))
    assert report["protocol"]["dtype"] == ("bfloat16" if dtype == "bfloat16" else "float32")


@pytest.mark.parametrize(("small", "expected"), [(0, [0, 1, 0, 0]), (2.5, [0, 1, 2, 0]), (3, [0, 1, 2, 3])])
def test_models_are_in_memory_together_only_while_they_are_small(
    small: float, expected: list[int], pair: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Any]] = []
    alive: list[int] = []

    @contextlib.contextmanager
    def watched(source: Source, *how: str) -> Iterator[Any]:
        alive.append(sum(reference() is not None for reference in loaded))
        with load(source, *how) as model:
            loaded.append(weakref.ref(model))
            yield model

    monkeypatch.setattr(module, "load", watched)
    assert pair[1].directory is not None
    monkeypatch.setattr(lockstep, "_SMALL", small * (pair[1].directory / "model.safetensors").stat().st_size)
    report = report_of([pair[0], pair[1], pair[1], pair[1]], TEXT, SHORT)
    assert alive == expected, "models that are there while another is loaded"
    source, *others = report["models"]
    assert source["kl_to_source"] == 0
    assert others[0] == others[1] == others[2]
    assert others[0]["kl_to_source"] > 0


PLACEMENTS: dict[str, dict[str, str]] = {
    "memory": {"": "cpu"},
    "last layers and head on disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.norm": "disk",
        "model.rotary_emb": "disk",
        "lm_head": "disk",
    },
    "embedding on disk": {
        "model.embed_tokens": "disk",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "disk": {"": "disk"},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_spread_by_a_device_map_scores_as_one_in_memory(
    checkpoint: Make, placement: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

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


def test_a_model_on_a_cpu_is_loaded_whole(pair: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    whole, asked = AutoModelForCausalLM.from_pretrained, []

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.append(options)
        return whole(*arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    with load(pair[0], device="cpu") as model:
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert "device_map" not in asked[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_a_gpu_scores_as_a_cpu_does(pair: list[Source], device: str) -> None:
    on_gpu = report_of(pair, TEXT, replace(SHORT, dtype="float32", device=device))
    on_cpu = report_of(pair, TEXT, replace(SHORT, dtype="float32"))
    for ours, theirs in zip(on_gpu["models"], on_cpu["models"], strict=True):
        assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=1e-3)


@pytest.mark.parametrize("content", ["[]", "{", '{"method": "theirs"}', '{"a":' * 5000])
def test_another_tools_provenance_says_nothing(pair: list[Source], content: str) -> None:
    assert pair[1].directory is not None
    (pair[1].directory / "conversion.json").write_text(content, encoding="utf-8")
    assert report_of(pair, TEXT, SHORT)["models"][1]["method"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"method": 5},
        {"method": ["svd"]},
        {"calibration_hash": 5},
        {"calibration": 5},
        {"calibration": ["a"]},
        {"calibration": {"tokens": "100"}},
    ],
    ids=str,
)
def test_provenance_of_other_types_fails_in_one_line(pair: list[Source], changes: dict[str, Any]) -> None:
    assert pair[1].directory is not None
    (pair[1].directory / "conversion.json").write_text(json.dumps({"kvfold": "0.1.0", "method": "svd"} | changes))
    with pytest.raises(Failure, match=f"conversion.json of .* is damaged: its {next(iter(changes))} is of another type"):
        report_of(pair, TEXT, SHORT)


@pytest.mark.parametrize("model_type", ["t5", "vit"])
def test_what_is_no_decoder_is_refused(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    with pytest.raises(Refusal, match="is not a decoder-only language model"):
        report_of([Source.parse(str(tmp_path))], TEXT, SHORT)


def test_a_model_calibrated_on_this_text_is_found_out(pair: list[Source]) -> None:
    assert pair[1].directory is not None
    tokens = tokens_of(pair[0], TEXT)
    seen = tokens.spread(300, 50)
    texts = [{"text": "its own text", "tokens": 100, "hash": "sha256:1"}, {"text": "a", "tokens": 300, "hash": seen.hash}]
    calibration = {"text": "its own text and a", "texts": texts, "tokens": 400, "context": 50}
    made = {"kvfold": "0.1.0", "calibration": calibration, "calibration_hash": "sha256:2"}
    (pair[1].directory / "conversion.json").write_text(json.dumps(made))
    source, converted = report_of(pair, TEXT, SHORT)["models"]
    assert source["calibration_overlap"] is None
    assert converted["calibration_overlap"] == overlap(tokens.ids[: SHORT.max_tokens], seen.ids) > 0
    texts[1]["hash"] = "sha256:0"
    (pair[1].directory / "conversion.json").write_text(json.dumps(made))
    assert report_of(pair, TEXT, SHORT)["models"][1]["calibration_overlap"] is None
    assert report_of(pair, TEXT, SHORT, tokens)["models"][1]["calibration_overlap"] == 1


@pytest.fixture
def named(checkpoint: Make) -> Callable[..., Source]:
    """Makes a model of some name, and the conversion.json that names its source and that one's weight files."""

    def make(name: str, of: str = "", **run: Any) -> Source:
        path = checkpoint(name=name)
        if of:
            made = {"kvfold": "0.1.0", "source": {"model": of}, "run": run}
            (path / "conversion.json").write_text(json.dumps(made))
        return Source.parse(str(path))

    return make


def remarked(*sources: Source, **settings: Any) -> list[list[str]]:
    return [model["remarks"] for model in report_of(sources, TEXT, replace(SHORT, **settings))["models"]]


def test_a_source_its_conversions_and_theirs_are_compared_without_remarks(named: Callable[..., Source]) -> None:
    source = named("source")
    first, second = named("first", "elsewhere/source@main"), named("second", "first")
    assert remarked(source, second, first) == [[]] * 3
    assert remarked(first, second) == [[]] * 2
    moved = named("third", "before", source_files=fingerprint(source.files))
    healed = {"model.safetensors": [1, 1]} | {f"teacher/{name}": file for name, file in fingerprint(source.files).items()}
    assert remarked(source, moved, named("healed", "before", source_files=healed)) == [[]] * 3
    assert remarked(named("other"), named("another")) == [[]] * 2, "of models of others, nothing is known"


def test_a_model_that_was_not_made_from_the_first_one_is_remarked(named: Callable[..., Source]) -> None:
    other, made = named("other"), named("made", "source")
    said = "was made from source, and other seems to be another model: give its own source first"
    assert remarked(other, made) == [[], [said]]
    assert remarked(other, made, cache_dtypes=("int8",)) == [[], [said], [], []], "once for each model"
    smaller = named("larger", "other", source_files={"model.safetensors": [1, 1]})
    assert "was made from other, and other seems to be another" in remarked(other, smaller)[1][0], "of the same name, not size"


def test_models_in_reversed_order_are_remarked(named: Callable[..., Source]) -> None:
    source, made = named("source"), named("made", "source")
    said = "is what made was made from, so the losses are the wrong way round: give it first"
    assert remarked(made, source) == [[], [said]]


def test_a_result_alone_is_compared_with_nothing(named: Callable[..., Source]) -> None:
    assert remarked(named("made", "source")) == [["is compared with nothing: give source, which it was made from, before it"]]
    assert remarked(named("source")) == [[]]


def test_tokenizers_that_differ_are_remarked(named: Callable[..., Source]) -> None:
    source, other = named("source"), named("other")
    file = other.files / "tokenizer.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"padding": None}, indent=4))
    assert remarked(source, other)[1] == [], "other bytes, and the same tokens"
    vocabulary = said["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    file.write_text(json.dumps(said))
    (remark,) = remarked(source, other)[1]
    assert remark == "has another tokenizer than source, which makes other tokens of this text: its figures mean nothing"
    file.write_text("{}")
    assert "which makes no tokens of this text: cannot load the tokenizer of" in remarked(source, other)[1][0]


def test_a_model_without_weights_is_named(pair: list[Source]) -> None:
    assert pair[1].directory is not None
    (pair[1].directory / "model.safetensors").unlink()
    with pytest.raises(Failure, match="cannot load"):
        report_of(pair, TEXT, SHORT)
