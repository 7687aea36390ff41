"""Published latent attention: it is counted as the class has it, and refused by every conversion in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from found_types import LATENTS, small
from rows import rows
from tiny import NORMED, random_model, save_tokenizer, tiny_config
from written import Convert, left_nothing, ok, refused

from attention.errors import Refusal
from convert.families.latent import NormalisedLatent
from convert.families.reading import family_for
from convert.families.reading.experiments import find
from eval.quality.cost import measured_bytes_per_token

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V3": ("deepseek_v3", NORMED | {"attention_bias": False}),
    "V3, biased": ("deepseek_v3", NORMED | {"rope_interleave": False, "attention_bias": True, "q_lora_rank": None}),
    "V3, YaRN": ("deepseek_v3", NORMED | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "V2": ("deepseek_v2", {"attention_bias": True}),
    "MiniCPM3": ("minicpm3", NORMED | {"attention_bias": False, "scale_depth": 1.4, "dim_model_base": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_its_tensors_are_those_of_the_class(case: str) -> None:
    model_type, changes = CASES[case]
    model = random_model(tiny_config(model_type, **changes))
    family = family_for(model.config)
    assert isinstance(family, NormalisedLatent)
    prefix = f"{family.module(1)}."
    there = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name.startswith(prefix)}
    assert family.of(model.config).shapes(1) == there
    assert family.of(model.config).scale == pytest.approx(model.get_submodule(family.module(1)).scaling)


@pytest.mark.parametrize("case", rows(CASES, ["V3, YaRN"]))
def test_it_is_counted_and_not_converted(case: str, convert: Convert, tmp_path: Any) -> None:
    model_type, changes = CASES[case]
    config, source, out = tiny_config(model_type, **changes), tmp_path / "source", tmp_path / "out"
    config.save_pretrained(source)
    facts = json.loads(ok(convert("inspect", source, "--json")).stdout)
    assert (facts["attention"], facts["kv_lora_rank"], facts["kv_bytes_per_token"]) == ("MLA-16+8", 16, 3 * 24 * 4)
    assert all(said.startswith("none (") for said in facts["output_classes"].values())
    rows = json.loads(ok(convert("plan", source, "--json")).stdout)["targets"]
    assert [row["kind"] for row in rows] == ["MLA-16+8"]
    result = convert("mla", source, out, "--kv-lora-rank", 8, "--qk-rope-head-dim", 8)
    left_nothing(result, 2, "has latent attention already (MLA-16+8), and kvfold makes a smaller latent only of", out)
    refused(convert("mqa", source, out), 2, "has a latent and no KV heads to merge")


@pytest.mark.parametrize("model_type", rows(LATENTS, LATENTS[:1]))
def test_types_without_a_row_are_counted_as_their_cache_is(model_type: str, convert: Convert, tmp_path: Any) -> None:
    model, source, out = random_model(small(model_type)), tmp_path / "source", tmp_path / "out"
    model.config.save_pretrained(source)
    rows = json.loads(ok(convert("plan", source, "--context", 1, "--json")).stdout)["targets"]
    assert [(row["kind"], row["kv_bytes"]) for row in rows] == [("MLA-16+8", measured_bytes_per_token(model, "float32"))]
    result = convert("mla", source, out, "--kv-lora-rank", 8, "--qk-rope-head-dim", 8)
    left_nothing(result, 2, "has latent attention already (MLA-16+8)", out)


def test_an_unknown_type_is_refused_by_its_latent() -> None:
    config = small("youtu")
    config.model_type = "another"
    with pytest.raises(Refusal, match=r"it is a published model with latent attention \(MLA-16\+8\)"):
        find(config)


def test_a_portable_result_is_not_made_smaller(tmp_path: Any, convert: Convert) -> None:
    random_model(tiny_config("deepseek_v3", attention_bias=False)).save_pretrained(tmp_path / "source")
    save_tokenizer(tmp_path / "source")
    result = convert("mla", tmp_path / "source", tmp_path / "out", "--kv-budget", "50%")
    left_nothing(result, 2, "makes a smaller latent only of results of its own", tmp_path / "out")
    assert "the original of a portable result" in result.stderr
