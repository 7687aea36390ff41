"""What arguments and configs of a healing show is refused before weights are read."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_config, tiny_model
from transformers import integrations
from written import weights

from attention.errors import Refusal
from convert import heal, mqa
from convert.checkpoint.loading import empty_model

Results = Callable[[str], Path]


@pytest.fixture
def planned(text: Path, sizes: dict[str, Any], tmp_path: Path) -> Callable[..., Any]:
    """The plan of a healing: `planned(path, train="all")`."""
    return lambda path, **given: heal(path, tmp_path / "out", **({"text": text, "dry_run": True} | sizes | given)).plan


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 0.0}, "lr is"),
        ({"lr": "fast"}, "invalid learning rate 'fast'"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": "many"}, "invalid number of tokens"),
        ({"context": 500}, "exceeds the 128 positions"),
        ({"device": "tpu"}, "no device 'tpu'|not supported"),
        ({"train": "everything"}, "nothing trains 'everything'"),
        ({"lora_rank": 4, "train": "all"}, "--lora-rank 4 is for --train lora, not all"),
        ({"cache_dtype": "int5"}, "no KV cache is kept in 'int5'"),
        ({"cache_dtype": "int8", "checkpointing": True}, "--checkpointing computes layers again without a cache"),
        ({"track": "pencil"}, "no tracker 'pencil' is installed, but "),
        ({"track": "wandb"}, "no tracker 'wandb' is installed"),
    ],
    ids=str,
)
def test_wrong_arguments(
    changes: dict[str, Any], says: str, converted: Path, planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integrations, "get_available_reporting_integrations", list)
    with pytest.raises(Refusal, match=says):
        planned(converted, **changes)


def test_a_package_that_is_not_installed(converted: Path, planned: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Refusal, match="needs peft") as error:
        planned(converted, train="lora")
    assert "kvfold[lora]" in str(error.value.hint)


def test_a_teacher_that_is_not_the_source(
    converted: Path, shelf: Callable[..., Path], planned: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model(tiny_config("llama", vocab_size=80)).save_pretrained(tmp_path / "other")
    with pytest.raises(Refusal, match=rf"\({VOCABULARY} tokens\) and its teacher .* \(80\) differ"):
        planned(converted, teacher=tmp_path / "other")
    with pytest.raises(Refusal, match="names its source"):
        planned(shelf("llama"))
    source = shelf("llama")
    moved = Path(shutil.copytree(converted, tmp_path / "moved"))
    provenance = json.loads((moved / "conversion.json").read_text())
    provenance["recipe"]["mqa"]["model"] = str(tmp_path / "gone")
    provenance["kv_bytes_per_token"]["cache_dtype"] = "kivi4"  # of an earlier version
    (moved / "conversion.json").write_text(json.dumps(provenance))
    with pytest.raises(Refusal, match="gone, which is not there") as error:
        planned(moved)
    assert "--teacher" in str(error.value.hint)
    with pytest.raises(Refusal, match="made for caches in 'kivi4', which this version does not know"):
        planned(moved, teacher=source)
    assert planned(moved, teacher=source, cache_dtype="float32").teacher.reference == str(source)


def test_pickled_weights_and_stacked_experts(shelf: Callable[..., Path], planned: Callable[..., Any], tmp_path: Path) -> None:
    mqa(shelf("mixtral"), tmp_path / "mqa", method="mean")
    with pytest.raises(Refusal, match="cannot be written back"):
        planned(tmp_path / "mqa", train="all")
    torch.save(weights(tmp_path / "mqa"), tmp_path / "mqa" / "pytorch_model.bin")
    (tmp_path / "mqa" / "model.safetensors").unlink()
    with pytest.raises(Refusal, match="holds pickled weights"):
        planned(tmp_path / "mqa")


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [({}, [512, 700, 2048]), ({"max_position_embeddings": 128}, [128] * 3), ({"sliding_window": 16}, [2048] * 3)],
    ids=["", "limit", "windows"],
)
def test_blocks_have_a_thousandth_of_all_tokens_within_bounds(
    changes: dict[str, int], lengths: list[int], shelf: Callable[..., Path], planned: Callable[..., Any], tmp_path: Path
) -> None:
    mqa(
        shelf("mistral", **{"max_position_embeddings": 4096, "sliding_window": None} | changes), tmp_path / "mqa", method="mean"
    )
    given = {"text": None, "context": None}
    assert [planned(tmp_path / "mqa", tokens=n, **given).context for n in (1000, 700_000, 10_000_000)] == lengths


def test_rates_are_tried_where_a_quarter_of_the_steps_suffices(results: Results, planned: Callable[..., Any]) -> None:
    given = {"lr": "auto", "batch_tokens": 16}
    few, enough = (planned(results("mla"), tokens=16 * steps, **given) for steps in (119, 120))
    assert (few.trial_steps, few.rates(0.3), few.rates(0.2)) == (0, [3e-5], [3e-6])
    assert (enough.trial_steps, enough.rates(0.5)) == (10, [3e-6, 1e-5, 3e-5])
    assert (enough.most_rates, planned(results("mla"), tokens=16 * 3000, **given).most_rates) == (3, 6)
    lora = planned(results("mla"), tokens=16 * 119, train="lora", **given)
    assert (lora.lora_rank, lora.rates(0.5)) == (16, pytest.approx([3e-4]))


def test_the_format_is_that_of_the_conversion_unless_another_is_given(
    results: Results, converted: Path, planned: Callable[..., Any]
) -> None:
    assert planned(converted).cache_dtype == "float32"
    assert planned(results("int2")).cache_dtype == planned(results("int2")).recipe()["cache_dtype"] == "int2"
    assert planned(results("int2"), cache_dtype="float32").rounding is None


def test_memory_counts_weights_by_what_is_kept_of_them(results: Results, planned: Callable[..., Any]) -> None:
    plan = planned(results("mla"))
    named = dict(empty_model(plan.converted.config).named_parameters())
    attention = sum(p.numel() for name, p in named.items() if "self_attn" in name or "input_layernorm" in name)
    found = plan.memory()
    assert found["student"] == 4 * sum(p.numel() for p in named.values())
    assert found["training"] == 20 * attention
    assert plan.memory(2)["training"] == 10 * attention
    thin = replace(plan, options=replace(plan.options, train="lora", lora_rank=2)).memory()["training"]
    assert 0 < thin < found["training"] / 4
    assert found["teacher"] == 4 * sum(p.numel() for p in empty_model(plan.teacher.config).parameters())
