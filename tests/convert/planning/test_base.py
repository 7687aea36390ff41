"""What a plan says of itself, what can be converted at all, and which output class carries it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import Sources, factored, grouped
from written import Make, damage, edit

from attention.errors import Refusal
from convert.families import FAMILIES
from convert.output.destination import Output
from convert.planning.allowed import convertible, readable
from convert.planning.calibration import CalibrationOptions, CalibrationText
from convert.planning.describe import inspection
from convert.planning.texts import texts_of
from eval.inputs.loading import load
from eval.inputs.source import Source

OWN = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
TEXT = CalibrationOptions(texts_of("some.txt", None), 640, 64)
SIZE = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}


def test_a_recipe_repeats_a_plan_from_any_directory(source: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").touch()
    source()
    output = Output(Path("out"), "bfloat16", 123_000_000)
    found = factored(Source.parse("source"), output, "weighted", TEXT, **SIZE).recipe
    assert found == {
        "model": str(tmp_path / "source"), "kv_lora_rank": 24, "qk_rope_head_dim": 8, "method": "weighted", "seed": 0,
        "dtype": "bfloat16", "max_shard_size": "123MB", "text": str(tmp_path / "some.txt"), "calibration_tokens": 640,
        "calibration_context": 64, "max_context": 128, "refit": True, "heal": 0,
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("size", "text"),
    [(5 * 10**9, "5GB"), (20_000, "20KB"), (1, "1B"), (1_000_001, "1000001B"), (1_500_000_000, "1500MB"), (10**12, "1000GB")],
)
def test_the_size_of_shards_is_exact(size: int, text: str, source: Sources, output: Output) -> None:
    plan = grouped(source(), Output(output.path, max_shard_size=size), 1, "mqa")
    assert plan.recipe["max_shard_size"] == text


def test_a_plan_in_numbers(source: Sources, output: Output) -> None:
    plan = factored(source(), Output(output.path, "bfloat16"), "weighted", TEXT, **SIZE)
    found = plan.as_dict()
    assert json.loads(json.dumps(found)) == found
    expected = {
        "command": "mla", "family": "llama", "source": "GQA-4", "target": "MLA-24+8", "query_heads": 8, "kv_heads_before": 4,
        "kv_lora_rank": 24, "qk_rope_head_dim": 8, "latent_channels": 23, "method": "weighted", "output_class": "deepseek_v3",
        "model_type": "deepseek_v3", "cache_dtype": "bfloat16", "kv_bytes_per_token_before": 3 * 2 * 4 * 8 * 4,
        "kv_bytes_per_token_after": 3 * 32 * 2,
    }  # fmt: skip
    assert found.items() >= expected.items()
    assert found["notes"] == list(plan.notes)
    own = grouped(source("qwen3"), output).as_dict()
    assert (own["model_type"], own["kv_heads_after"], own["calibration"]) == ("qwen3", 2, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model type 'bert' cannot be read: its first layer has no attention with projections"),
        ({"model_type": "chatglm", "auto_map": OWN}, "model type 'chatglm' cannot be read: its class is code of its own"),
        ({"model_type": "t5"}, "is an encoder–decoder (model type 't5'): its decoder attends to an encoder's states, too"),
        ({"model_type": "mllama", "text_config": {}}, "model type 'mllama' cannot be read: layer 3 has no attention like"),
        ({"num_key_value_heads": 3}, "8 query heads cannot share 3 KV heads"),
        ({"per_layer_config": {"0": {"intermediate_size": 16}}}, "has layers with settings of their own (per_layer_config)"),
    ],
)
def test_what_cannot_be_read_is_refused(changes: dict[str, Any], message: str, source: Sources) -> None:
    path = edit(Path(source().reference), **changes)
    for trusting in (False, True):
        with pytest.raises(Refusal) as caught:
            _ = readable(Source.parse(str(path), trusting)).spec
        assert message in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=FineGrainedFP8Config(dequantize=True)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "from_pretrained(MODEL).dequantize().save_pretrained(DIR"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, "mlx_lm.convert --hf-path MODEL --mlx-path DIR --dequantize"),
    ],
)
def test_what_is_quantised_can_be_read_but_not_converted(changes: dict[str, Any], message: str, source: Sources) -> None:
    made = source()
    edit(Path(made.reference), **changes)
    assert readable(made) == FAMILIES["llama"]
    with pytest.raises(Refusal) as caught:
        convertible(made)
    assert message in f"{caught.value} {caught.value.hint}"


def test_what_only_says_that_it_is_quantised_is_told_to_leave_that_out(checkpoint: Make) -> None:
    path = edit(checkpoint(), quantization_config={"quant_method": "gptq", "bits": 4})
    source = Source.parse(str(path))
    with pytest.raises(Refusal, match=r"says in quantization_config that it is quantised \(gptq\), and none of its") as caught:
        convertible(source)
    assert caught.value.hint == "if they were merged or dequantised, take quantization_config out"
    assert "take quantization_config out" in str(inspection(source))
    with pytest.raises(Refusal, match="and none of its weights is"), load(source):
        pass
    damage(path, lambda tensors: tensors.update({min(tensors): tensors[min(tensors)].to(torch.int8)}))
    with pytest.raises(Refusal, match=r"is quantised \(gptq\)$"):
        convertible(Source.parse(str(path)))


BOTH_WAYS = {"use_bidirectional_attention": True}
HIDDEN = "only outputs are refitted:"


@pytest.mark.parametrize(
    ("model_type", "changes", "refit", "note"),
    [
        ("llama", {}, True, None),
        ("gemma2", {}, True, None),
        ("mistral", {"sliding_window": 32}, True, None),
        ("gemma2", BOTH_WAYS, True, f"{HIDDEN} use_bidirectional_attention changes what heads attend to"),
        ("gemma2", BOTH_WAYS, False, None),
        ("qwen3", {}, True, None),
    ],
)
def test_what_cannot_be_refitted_is_remarked(
    model_type: str, changes: dict[str, Any], refit: bool, note: str | None, source: Sources, output: Output
) -> None:
    text = replace(TEXT, refit=refit, heal=0)
    plan = grouped(source(model_type, **changes), output, method="aligned", text=text)
    assert [said for said in plan.notes if said.startswith(HIDDEN)] == ([] if note is None else [note])


LINES = "a line of words, and another " * 20


def inputs(source: Path, groups: int = 2, method: str = "aligned", given: Any = LINES, **options: Any) -> dict[str, Any]:
    """Of a conversion to fewer heads, with strings or files as its text."""
    text = CalibrationOptions(
        texts_of([given] if isinstance(given, str) else given, None), **{"tokens": 256, "context": 32} | options
    )
    plan = grouped(Source.parse(str(source)), Output(source.with_name("out")), groups, method=method, text=text)
    return plan.inputs(CalibrationText.read(plan.source, plan.calibration).hashes)


def test_a_text_is_known_by_its_tokens_wherever_it_lies(checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.txt", "elsewhere/b.txt"):
        (tmp_path / name).write_text(LINES)
    source = checkpoint()
    assert inputs(source) == inputs(source, given=tmp_path / "a.txt") == inputs(source, given=tmp_path / "elsewhere" / "b.txt")


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"groups": 1}, {"groups"}),
        ({"given": LINES[::-1]}, {"calibration_hashes"}),
        ({"context": 16}, {"calibration_context"}),
        ({"tokens": 128}, {"calibration_tokens"}),
        ({"refit": False}, {"refit"}),
        ({"method": "mean", "refit": True}, {"method", "max_context"}),
        ({"heal": 640}, set()),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "differing",
)
def test_settings_and_text_are_inputs(changes: dict[str, Any], differing: set[str], checkpoint: Make) -> None:
    source = checkpoint()
    before, after = inputs(source), inputs(source, **changes)
    assert {key for key in before | after if before.get(key) != after.get(key)} == differing


def test_config_and_weights_are_inputs(checkpoint: Make) -> None:
    source = checkpoint()
    before = inputs(source)
    os.utime(source / "model.safetensors", ns=(0, 0))
    touched = inputs(source)
    assert {key for key in before if before[key] != touched[key]} == {"files"}
    edited = inputs(edit(source, rms_norm_eps=0.5))
    assert {key for key in before if touched[key] != edited[key]} == {"config"}
