"""What is said of checkpoints from their configs alone: with KV heads, and with a latent."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from convert.families import FAMILIES
from convert.methods import load_grouped, load_latent
from convert.planning.base import Output
from convert.planning.calibration import CalibrationOptions
from convert.planning.describe import capacity, conversion_text, grouped_targets, inspection, plan_text, plans_text, support
from convert.planning.grouped import plan_grouped
from convert.planning.latent import LatentRequest, plan_latent
from eval.source import Source

Sources = Callable[..., Source]
ROOM = {"small": 1e-3, "large": 80.0}


def test_a_source_with_kv_heads_is_inspected(source: Sources) -> None:
    found = inspection(source())
    assert json.loads(json.dumps(found)) == found
    expected = {
        "family": "llama", "attention": "GQA-4", "layers": 3, "query_heads": 8, "kv_heads": 4, "head_dim": 8,
        "groups_possible": [4, 2, 1], "kv_bytes_per_token": 768,
    }  # fmt: skip
    assert found.items() >= expected.items()
    assert "kv_lora_rank" not in found
    assert found["latents_possible"][0] == "MLA-24+8"
    assert "groups possible" in str(found)


def test_a_source_with_a_latent_is_inspected(source: Sources) -> None:
    found = inspection(source("deepseek_v3"))
    assert json.loads(json.dumps(found)) == found
    expected = {
        "family": "deepseek_v3", "layout": "latent projections", "attention": "MLA-16+8", "kv_heads": None, "head_dim": 10,
        "kv_lora_rank": 16, "qk_nope_head_dim": 12, "groups_possible": [], "kv_bytes_per_token": 3 * 24 * 4,
    }  # fmt: skip
    assert found.items() >= expected.items()
    assert found["output_classes"]["mla"] == "deepseek_v3, loads in transformers"
    assert (
        found["output_classes"]["gqa"]
        == found["output_classes"]["mqa"]
        == ("none (MLA-16+8 has a latent and no KV heads to merge)")
    )
    rows = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in str(found).splitlines()}
    assert rows["kv heads"] == rows["groups possible"] == "none"


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_what_each_target_takes(model_type: str, source: Sources) -> None:
    made = source(model_type)
    found = capacity(made, "bfloat16", 2, 100, ROOM, 0.9)
    assert json.loads(json.dumps(found)) == found
    first, *others = found["targets"]
    assert first["kind"] == inspection(made)["attention"]
    assert first["kv_bytes"] == 2 * 100 * first["kv_bytes_per_token"]
    assert others
    assert all(row["kv_bytes_per_token"] < first["kv_bytes_per_token"] for row in others)
    for row in found["targets"]:
        assert row["fits"] == {"small": row["kv_bytes"] + row["weight_bytes"] <= 9e5, "large": True}
    assert f"{first['kind']} (source)" in str(found)


def test_the_source_is_counted_by_its_own_tensors(source: Sources) -> None:
    from eval.capacity import count_parameters

    for model_type in ("llama", "deepseek_v3"):
        made = source(model_type)
        assert capacity(made, "bfloat16", 1, 10, ROOM, 0.9)["targets"][0]["parameters"] == count_parameters(made.config, False)


def test_grouped_targets_begin_with_the_source(source: Sources) -> None:
    kinds = [target.kind for target in grouped_targets(FAMILIES["llama"].spec(source().config))]
    assert kinds == ["GQA-4", "GQA-2", "MQA"]
    assert grouped_targets(FAMILIES["deepseek_v3"].spec(source("deepseek_v3").config)) == []


def test_support_has_a_row_for_each_family() -> None:
    rows = {row["family"]: row for row in support()}
    assert rows.keys() == FAMILIES.keys()
    assert rows["deepseek_v3"]["mla"] == "deepseek_v3"
    assert rows["qwen2"]["mla"] == "-"


def test_plans_in_words(source: Sources, output: Output) -> None:
    latent = plan_latent(
        source("deepseek_v3"), LatentRequest(12, 8), load_latent("svd"), CalibrationOptions(), "cpu",
        Output(output.path, "bfloat16"),
    )  # fmt: skip
    text = plan_text(latent).splitlines()
    assert text[0] == "MLA-16+8 → MLA-12+8, method svd (singular vectors of the weights alone)"
    assert text[1] == "KV cache: 288 → 120 bytes per token (41.7%, kept in bfloat16, was float32)"
    assert text[-1] == f"would be written to {output.path}, loads in transformers as deepseek_v3"
    grouped = plan_grouped("gqa", source(), 2, load_grouped("mean"), 0, "cpu", output)
    assert conversion_text(grouped, {}).splitlines()[-1] == f"written to {output.path}, loads in transformers as llama"
    table = plans_text([grouped, latent])
    assert "GQA-2" in table
    assert "MLA-12+8" in table
