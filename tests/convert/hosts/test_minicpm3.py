"""Stock MiniCPM3 as an output class of MLA: exact for gemma at full size, gains stored whole, refused where it differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import full_size, logits_of, same_logits, tokens
from tiny import tiny_config
from written import Convert, Make, ok, weights

from attention import load
from attention.latent import StockLatentAttention
from convert.families import FAMILIES, family_of
from convert.families.deepseek import MINICPM3
from convert.hosts.minicpm3 import HOST

SMALL = ["--kv-lora-rank", 16, "--qk-rope-head-dim", 8]


def full(changes: dict[str, Any]) -> list[Any]:
    return full_size(4, changes.get("head_dim", 8), changes.get("hidden_size", 64))


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_gains_are_one_more_than_gemma_stores_rounded_once(
    stored: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source = checkpoint("gemma")
    ok(convert("mla", source, tmp_path / "out", *full({}), "--method", "svd", "--dtype", stored))
    before, after = weights(source), weights(tmp_path / "out")
    norms = [name for name in before if name.endswith("norm.weight")]
    assert len(norms) == 7
    for name in norms:
        assert torch.equal(after[name], (before[name].double() + 1).to(getattr(torch, stored))), name
    provenance = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert set(norms) <= set(provenance["tensors"]["converted"])


@pytest.mark.parametrize("biased", [False, True])
def test_it_decodes_over_its_latent(biased: bool, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("mla", checkpoint("gemma", attention_bias=biased), tmp_path / "out", *SMALL))
    ids, model = tokens(12), load(tmp_path / "out", when="always")
    modules = [module for module in model.modules() if isinstance(module, StockLatentAttention)]
    assert len(modules) == 3
    assert all(module.constant_channels is not None and (module.bias_channel is None) != biased for module in modules)
    with torch.inference_mode():
        same_logits(model(ids).logits, logits_of(tmp_path / "out", ids))
        asked = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(model.generate(ids, **asked), model.generate(ids, use_cache=False, **asked))
    model.save_pretrained(tmp_path / "again")
    same_logits(logits_of(tmp_path / "again", ids), logits_of(tmp_path / "out", ids), 1e-6)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}], ids=["plain", "biases"])
def test_a_result_is_a_source(changes: dict[str, Any], checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source, ids = checkpoint("gemma", **changes), tokens(20)
    ok(convert("mla", source, tmp_path / "out", *full({}), "--method", "svd"))
    padded = ["--kv-lora-rank", 36, "--qk-rope-head-dim", 32, "--pad-rank"]
    ok(convert("mla", tmp_path / "out", tmp_path / "same", *padded, "--method", "svd"))
    same_logits(logits_of(tmp_path / "same", ids), logits_of(source, ids))
    ok(convert("mla", tmp_path / "out", tmp_path / "less", *SMALL))
    config = json.loads((tmp_path / "less" / "config.json").read_text())
    assert (config["model_type"], config["scale_emb"], config["dim_model_base"]) == ("minicpm3", 8.0, 64)
    with torch.inference_mode():
        same_logits(load(tmp_path / "less", when="always")(ids).logits, logits_of(tmp_path / "less", ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "config.json sets use_bidirectional_attention to True"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "RoPE of type 'dynamic'"),
        ({"hidden_size": 68}, "hidden_size is 68, and the class takes only multiples of the 8 attention heads"),
        ({}, "None"),
    ],
)
def test_what_the_class_cannot_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    config, family = tiny_config("gemma", **changes), family_of("gemma")
    assert message in str(HOST.refuses(family, config, family.spec(config).latent(16, 8)))


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in HOST.families])
def test_all_other_families_are_refused(model_type: str) -> None:
    config, family = tiny_config(model_type), family_of(model_type)
    found = str(HOST.refuses(family, config, family.spec(config)))
    assert f"{model_type} does not have Gemma's decoder blocks (the class can hold gemma, minicpm3)" in found


def test_what_it_refuses_has_kvfolds_class(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    source = checkpoint("gemma", rope_parameters=dynamic)
    facts = json.loads(convert("mla", source, tmp_path / "out", *SMALL, "--dry-run", "--json").stdout)
    assert facts["output_class"] == "kvfold"


@pytest.mark.parametrize("changes", [{"attention_bias": False}, {"q_lora_rank": 24}, {"scale_depth": 1.4}], ids=str)
def test_minicpms_own_checkpoints_have_the_family_of_a_norm(changes: dict[str, Any]) -> None:
    family = family_of("minicpm3")
    assert family.for_config(tiny_config("minicpm3")) is family
    assert family.for_config(tiny_config("minicpm3", **changes)) is MINICPM3


def test_layers_that_scale_what_they_add_add_no_plain_output() -> None:
    family = family_of("minicpm3")
    assert family.traits(tiny_config("minicpm3")).adds_output
    assert not family.traits(tiny_config("minicpm3", scale_depth=1.4)).adds_output
