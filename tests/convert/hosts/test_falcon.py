"""Stock Falcon as an output class of MQA: exact where heads are equal, and refused where its blocks differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import run_without_kvfold
from tiny import tiny_config
from written import Convert, Logits, Make, ok

from convert.families import family_of
from convert.hosts.falcon import HOST
from eval.inputs.source import Source
from eval.quality.cost import cache_figures

ONE_AFTER_THE_OTHER: dict[str, Any] = {"use_parallel_residual": False}
ROPE: dict[str, dict[str, Any]] = {
    "all dims": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    "a quarter": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "half, linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "all, dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}


def made(checkpoint: Make, rope: str = "a quarter", **changes: Any) -> Path:
    return checkpoint("gpt_neox", **ONE_AFTER_THE_OTHER, rope_parameters=ROPE[rope], **changes)


@pytest.mark.parametrize("rope", ROPE)
def test_equal_heads_become_one_without_loss(
    rope: str, checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    source = made(checkpoint, rope, duplicated=8, hidden_size=128)
    ok(convert("mqa", source, tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["multi_query"], config["new_decoder_architecture"]) == ("falcon", True, False)
    expected = logits(source)
    assert float((logits(tmp_path / "out") - expected).abs().max() / expected.abs().max()) < 1e-5
    again = ok(convert("inspect", tmp_path / "out", "--json"))
    assert (json.loads(again.stdout)["family"], json.loads(again.stdout)["attention"]) == ("falcon", "MQA")


RUN = """
import json
from alike import cached_by
model, cache = cached_by(sys.argv[1])
print(json.dumps([type(model).__name__, cache.keys.shape[1]]))
"""


def test_a_result_runs_where_kvfold_is_not_installed(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("mqa", made(checkpoint), tmp_path / "out", "--method", "mean"))
    done = run_without_kvfold(RUN, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["FalconForCausalLM", 1]


def test_the_cache_has_the_bytes_that_the_plan_says(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = made(checkpoint)
    planned = json.loads(convert("mqa", source, tmp_path / "out", "--dry-run", "--json").stdout)
    ok(convert("mqa", source, tmp_path / "out"))
    found = Source.parse(str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    figures = cache_figures(model, family_of("falcon").spec(found.config), "float32", planned["kv_bytes_per_token_before"])
    assert figures["kv_bytes_per_token"] == planned["kv_bytes_per_token_after"]
    assert figures["cache_ratio"] == 1 / 8


@pytest.mark.parametrize(
    ("changes", "groups", "message"),
    [
        ({"use_parallel_residual": True}, 1, "use_parallel_residual is true"),
        ({"attention_bias": False}, 1, "attention_bias is false"),
        ({"num_attention_heads": 8, "hidden_size": 72}, 1, "heads have 9 dims"),
        ({}, 2, "caches keys and values of all 8 query heads"),
        ({"rope_parameters": ROPE["all, dynamic"] | {"partial_rotary_factor": 0.5}}, 1, "4 of 8 dims rotate"),
        (
            {
                "rope_parameters": ROPE["a quarter"]
                | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
            },
            1,
            "RoPE of type 'yarn' cannot say that some are nope dims",
        ),
        ({}, 1, "None"),
    ],
)
def test_what_the_class_cannot_compute_is_refused(changes: dict[str, Any], groups: int, message: str) -> None:
    config, family = tiny_config("gpt_neox", **(ONE_AFTER_THE_OTHER | changes)), family_of("gpt_neox")
    assert message in str(HOST.refuses(family, config, family.spec(config).grouped(groups)))


def test_what_it_refuses_has_kvfolds_class(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("gpt_neox", use_parallel_residual=True)
    facts = json.loads(convert("mqa", source, tmp_path / "out", "--dry-run", "--json").stdout)
    assert facts["output_class"] == "kvfold"
    assert "opt does not have Falcon's decoder blocks" in str(
        HOST.refuses(family_of("opt"), tiny_config("opt"), family_of("opt").spec(tiny_config("opt")).grouped(1))
    )
