"""Latent attention as DeepSeek made it: what records say, and smaller latents behind the norm of the source's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import decodes_alike
from hypothesis import given, settings
from hypothesis import strategies as st
from latents import method_options, same_logits, tokens
from records import run
from tiny import NORMED, layer_tensors, random_model, save_tokenizer, tiny_config
from written import Convert, damage, edit, layer_notes, left_nothing, ok, refused, weights

from attention import load
from attention.models import MODEL_TYPE
from convert.families import FAMILIES
from convert.families.deepseek import NormalisedLatent
from eval.quality.cost import measured_bytes_per_token

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN: dict[str, Any] = {"q_lora_rank": None, "attention_bias": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V3": ("deepseek_v3", NORMED | {"attention_bias": False}),
    "V3 in halves, biased": ("deepseek_v3", NORMED | {"rope_interleave": False, "attention_bias": True, "q_lora_rank": None}),
    "V3, YaRN": ("deepseek_v3", NORMED | SCALED),
    "V3, dense": ("deepseek_v3", NORMED | PLAIN | {"first_k_dense_replace": 3}),
    "V3, dynamic": ("deepseek_v3", NORMED | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "V2": ("deepseek_v2", {"attention_bias": True}),
    "V2, YaRN, no latent of queries": ("deepseek_v2", PLAIN | SCALED),
    "MiniCPM3": ("minicpm3", NORMED | {"attention_bias": False, "scale_depth": 1.4, "dim_model_base": 16}),
    "MiniCPM3, biased": ("minicpm3", NORMED | SCALED | {"attention_bias": True, "q_lora_rank": None}),
}
FEW = ("V3, YaRN", "V2", "MiniCPM3")


def model_of(case: str, kept: int | None = None, **changes: Any) -> Any:
    """A random model; keys and values of the latent may need `kept` of its directions alone."""
    model_type, own = CASES[case]
    model = random_model(tiny_config(model_type, **{**own, **changes}))
    if kept is not None:
        for layer in model.model.layers:
            with torch.no_grad():
                up = layer.self_attn.kv_b_proj.weight
                basis = torch.linalg.qr(torch.randn(up.shape[1], kept, generator=torch.Generator().manual_seed(3)))[0]
                up.copy_(up @ basis @ basis.T)
    return model


def saved(path: Path, case: str, kept: int | None = None, **changes: Any) -> Path:
    model_of(case, kept, **changes).save_pretrained(path)
    save_tokenizer(path)
    return path


def stock(path: Path, **arguments: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, **arguments).eval()


def said(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


def sized(rank: int, rope: int = 8, *more: Any) -> list[Any]:
    return ["--kv-lora-rank", rank, "--qk-rope-head-dim", rope, *more]


# ---- records ---------------------------------------------------------------------------------------------------------


def same_record(model: Any) -> None:
    """A layer's record computes what transformers' class does, and is joined bit for bit."""
    family, seen = FAMILIES[model.config.model_type].for_config(model.config), []
    assert isinstance(family, NormalisedLatent)
    assert family.unreadable(model.config) is None
    attention = model.get_submodule(family.module(1))
    attention.register_forward_pre_hook(lambda _, args, given: seen.append(given["hidden_states"]), with_kwargs=True)
    model.get_submodule(family.output(1)).register_forward_hook(lambda _, args, out: seen.append(out))
    said(model, torch.arange(4, 34)[None])
    tensors = layer_tensors(model, family, 1)
    assert {name for name in model.state_dict() if name.startswith(f"{family.module(1)}.")} == tensors.keys()
    record = family.split(tensors, model.config, 1)
    joined = family.join(record, family.spec(model.config), 1)
    assert joined.keys() == tensors.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in tensors.items())
    for form in (record, record.expanded()):  # type: ignore[union-attr]
        torch.testing.assert_close(run(form, seen[0]).float(), seen[1], rtol=1e-4, atol=1e-4 * float(seen[1].abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_records_compute_what_the_class_does(case: str) -> None:
    same_record(model_of(case))


EVEN = st.integers(1, 9).map(lambda half: 2 * half)  # the class of DeepSeek-V2 takes pairs of neighbours as complex numbers


@settings(max_examples=8, deadline=None)
@given(
    model_type=st.sampled_from(["deepseek_v2", "deepseek_v3", "minicpm3"]), rank=EVEN, pairs=st.integers(1, 4), nope=EVEN,
    value=st.integers(1, 9), queries=st.none() | st.integers(2, 30), biased=st.booleans(),
    interleaved=st.booleans(), scaled=st.booleans(),
)  # fmt: skip
def test_records_of_any_sizes(
    model_type: str, rank: int, pairs: int, nope: int, value: int, queries: int | None, biased: bool, interleaved: bool,
    scaled: bool,
) -> None:  # fmt: skip
    sizes = {
        "kv_lora_rank": rank, "qk_rope_head_dim": 2 * pairs, "qk_nope_head_dim": nope, "v_head_dim": value,
        "q_lora_rank": queries, "head_dim": 2 * pairs,
    }  # fmt: skip
    switches = {"attention_bias": biased, "rope_interleave": interleaved, **(SCALED if scaled else {})}
    same_record(random_model(tiny_config(model_type, **{**NORMED, **sizes, **switches, "num_hidden_layers": 2})))


# ---- smaller latents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost_that_the_latent_does_not_hold(case: str, convert: Convert, tmp_path: Path) -> None:
    source, ids = saved(tmp_path / "source", case, kept=8), tokens(20)
    expected = said(stock(source), ids)
    for name, size in (("eight", sized(8)), ("padded", sized(24, 8, "--pad-rank"))):
        out = tmp_path / name
        ok(convert("mla", source, out, *size, "--method", "svd"))
        config = json.loads((out / "config.json").read_text())
        assert (config["model_type"], config["text_config"]["model_type"]) == (MODEL_TYPE, CASES[case][0])
        assert config["source_latent"] == {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "eps": 1e-6}
        same_logits(said(stock(out), ids), expected)
        same_logits(said(load(out, when="always"), ids), expected)
        assert max(max(note["score_error"], note["output_error"]) for note in layer_notes(out)) < 1e-9
    before, after = weights(source), weights(tmp_path / "eight")
    own = {"kv_a_proj_with_mqa": "kv_proj", "kv_a_layernorm": "kv_norm", "q_a_layernorm": "q_norm"}
    for name, tensor in before.items():
        if name.endswith(("kv_b_proj.weight", "o_proj.weight", "o_proj.bias")):
            continue
        for old, new in own.items():
            name = name.replace(f"self_attn.{old}.", f"self_attn.{new}.")
        assert torch.equal(after[f"model.{name}"].flatten(), tensor.flatten()), name


@pytest.mark.parametrize("case", FEW)
def test_small_sizes_run_alike_in_every_way(case: str, convert: Convert, tmp_path: Path) -> None:
    source, ids = saved(tmp_path / "source", case), tokens(12)
    out = tmp_path / "out"
    planned = json.loads(convert("mla", source, out, *sized(10, 4), "--dry-run", "--json").stdout)
    ok(convert("mla", source, out, *sized(10, 4)))
    assert planned["kv_bytes_per_token_before"] == 3 * 24 * 4
    assert planned["kv_bytes_per_token_after"] == 3 * 14 * 4 == measured_bytes_per_token(load(out), "float32")
    plain, absorbed = stock(out), load(out, when="always")
    expected = said(plain, ids)
    assert float((expected - said(stock(source), ids)).abs().max()) > 1e-3
    for model in (absorbed, load(out, attn_implementation="eager")):
        same_logits(said(model, ids), expected)
    assert torch.equal(decodes_alike(plain, ids, static=False), decodes_alike(absorbed, ids))
    absorbed.save_pretrained(tmp_path / "again")
    same_logits(said(stock(tmp_path / "again"), ids), expected, 1e-6)


@pytest.mark.parametrize("method", ["svd", "weighted", "weighted with text", "pca"])
@pytest.mark.parametrize("case", ["V3", "V2"])
def test_every_method_makes_smaller_latents(method: str, case: str, convert: Convert, words: Path, tmp_path: Path) -> None:
    source, options = saved(tmp_path / "source", case), method_options(method, words)
    more = ["--refine", 2] if "text" in method else []
    ok(convert("mla", source, tmp_path / "out", *sized(8), *options, *more))
    assert torch.isfinite(said(load(tmp_path / "out"), tokens(20))).all()


@pytest.mark.parametrize("case", FEW)
def test_text_lowers_the_error(case: str, convert: Convert, words: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = saved(tmp_path / "source", case)
    ids = AutoTokenizer.from_pretrained(source)(words.read_text()[:512], return_tensors="pt").input_ids.view(-1, 128)
    expected, errors = said(stock(source), ids), {}
    for name in ("weighted", "weighted with text"):
        ok(convert("mla", source, tmp_path / name, *sized(10), *method_options(name, words)))
        errors[name] = float((said(stock(tmp_path / name), ids) - expected).norm() / expected.norm())
    assert errors["weighted with text"] < 0.9 * errors["weighted"], errors


@pytest.mark.parametrize("case", FEW)
def test_a_result_is_a_source(case: str, convert: Convert, tmp_path: Path) -> None:
    source, ids = saved(tmp_path / "source", case, kept=6), tokens(20)
    ok(convert("mla", source, tmp_path / "out", *sized(12), "--method", "svd"))
    ok(convert("mla", tmp_path / "out", tmp_path / "less", *sized(6), "--method", "svd"))
    same_logits(said(stock(tmp_path / "less"), ids), said(stock(source), ids))
    ok(convert("mla", tmp_path / "out", tmp_path / "least", *sized(5, 4), "--method", "svd"))
    assert torch.isfinite(said(load(tmp_path / "least"), ids)).all()
    facts = json.loads(convert("inspect", tmp_path / "least", "--json").stdout)
    assert (facts["attention"], facts["rotary_dims"], facts["qk_nope_head_dim"]) == ("MLA-5+4", 4, 20)
    more = convert("mla", tmp_path / "least", tmp_path / "more", *sized(6, 4))
    left_nothing(more, 2, "rank 6 exceeds full size", tmp_path / "more")


def test_half_precision_is_that_of_the_source(convert: Convert, tmp_path: Path) -> None:
    # All experts serve every token: rounding sends none to another one.
    every = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    source, ids = saved(tmp_path / "source", "V3, YaRN", **every), tokens(12)
    ok(convert("mla", source, tmp_path / "out", *sized(24, 8, "--pad-rank"), "--dtype", "bfloat16"))
    exact, half = said(stock(source), ids), said(stock(source, dtype=torch.bfloat16), ids)
    off = float((half - exact).norm() / exact.norm())
    for model in (stock(tmp_path / "out", dtype=torch.bfloat16), load(tmp_path / "out", when="always", dtype=torch.bfloat16)):
        assert float((said(model, ids) - exact).norm() / exact.norm()) < 3 * off + 0.02
        assert model.model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32, "as in the source's class"


def test_the_attention_function_can_be_changed(convert: Convert, tmp_path: Path) -> None:
    """The class inside has a config of its own, with the sizes of the source's latent."""
    ok(convert("mla", saved(tmp_path / "source", "V2"), tmp_path / "out", *sized(8, 4)))
    model = stock(tmp_path / "out")
    assert model.config.text_config.qk_rope_head_dim == 4
    assert model.model.config.qk_rope_head_dim == 8
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        assert model(tokens(6), output_attentions=True).attentions[0].shape == (2, 8, 6, 6)


def test_modules_that_predict_further_tokens_are_left_out(convert: Convert, tmp_path: Path) -> None:
    """As transformers' class leaves them out, by the numbers that they have in DeepSeek-V3."""

    def predict(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.61.eh_proj.weight"] = torch.ones(64, 128)

    source = damage(saved(tmp_path / "source", "V3"), predict)
    ok(convert("mla", source, tmp_path / "out", *sized(8)))
    dropped = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]["dropped"]
    assert "model.layers.61.eh_proj.weight" in dropped
    assert torch.isfinite(said(stock(tmp_path / "out"), tokens(6))).all()


def test_a_config_as_deepseek_writes_it_is_read(convert: Convert, tmp_path: Path) -> None:
    """With older names for RoPE, and code of its own, which transformers' class takes the place of."""
    source, ids = saved(tmp_path / "source", "V3, YaRN", kept=8), tokens(20)
    expected, config = said(stock(source), ids), json.loads((source / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    theta = parameters.pop("rope_theta")
    older = {"rope_theta": theta, "rope_scaling": {"type": parameters.pop("rope_type"), **parameters}}
    code = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (source / "config.json").write_text(json.dumps(config | older | code))
    ok(convert("mla", source, tmp_path / "out", *sized(8), "--method", "svd"))
    same_logits(said(stock(tmp_path / "out"), ids), expected)
    config = model_of("V3").config
    foreign = type("DeepseekV3Config", (type(config),), {"__module__": "transformers_modules.deepseek"})()
    assert "leave out --trust-remote-code" in str(FAMILIES["deepseek_v3"].for_config(foreign).unreadable(foreign))


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FEW)
def test_the_sizes_that_it_can_have_are_planned(case: str, convert: Convert, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", case)
    (source / "model.safetensors").unlink()
    facts = json.loads(ok(convert("inspect", source, "--json")).stdout)
    assert (facts["attention"], facts["kv_heads"], facts["rotary_dims"]) == ("MLA-16+8", None, 8)
    assert (facts["kv_lora_rank"], facts["kv_bytes_per_token"]) == (16, 3 * 24 * 4)
    assert facts["output_classes"]["mla"] == f"{MODEL_TYPE}, loads in transformers, with kvfold's code"
    assert facts["output_classes"]["gqa"] == "none (MLA-16+8 has a latent and no KV heads to merge)"
    half = json.loads(ok(convert("mla", source, tmp_path / "out", "--kv-budget", "50%", "--dry-run", "--json")).stdout)
    assert (half["target"], half["kv_bytes_per_token_after"]) == ("MLA-10+2", 3 * 12 * 4)
    rows = json.loads(ok(convert("plan", source, "--json")).stdout)["targets"]
    assert rows[0]["kind"] == "MLA-16+8"
    refused(convert("mla", source, tmp_path / "out", *sized(17)), 2, "rank 17 exceeds full size: at 8 rotary dims")
    refused(convert("mla", source, tmp_path / "out", *sized(8, 10)), 2, "cannot keep 10 rotary dims of the 8")
    refused(convert("mqa", source, tmp_path / "out"), 2, "has a latent and no KV heads to merge")


@pytest.mark.parametrize("case", FEW)
def test_its_own_size_is_a_copy(case: str, convert: Convert, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", case)
    ok(convert("mla", source, tmp_path / "out", *sized(16), "--force"))
    before, after = weights(source), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("V3", {"num_key_value_heads": 4}, "its class repeats those of 4 (num_key_value_heads)"),
        ("V2", {"num_key_value_heads": 4}, "its class repeats those of 4 (num_key_value_heads)"),
        ("V2", {"rope_parameters": LONG | {"mscale_all_dim": 1.0}}, "by a factor that it lacks"),
        ("V3", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "RoPE rotates 4 dims, and the RoPE key has 8"),
    ],
)
def test_what_its_class_cannot_run_is_refused(
    case: str, changes: dict[str, Any], message: str, convert: Convert, tmp_path: Path
) -> None:
    source = edit(saved(tmp_path / "source", case), **changes)
    left_nothing(convert("mla", source, tmp_path / "out", *sized(8)), 2, message, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source_latent": {"kv_lora_rank": 16}},
            "it must have the keys kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim and eps",
        ),
        ({"source_latent": {"kv_lora_rank": 16, "qk_rope_head_dim": 0, "qk_nope_head_dim": 12, "eps": 1e-6}}, "above 0"),
        ({"source_latent": {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "eps": None}}, "has eps None"),
    ],
)
def test_a_damaged_config_is_refused(changes: dict[str, Any], message: str, convert: Convert, tmp_path: Path) -> None:
    ok(convert("mla", saved(tmp_path / "source", "V2"), tmp_path / "out", *sized(8)))
    refused(convert("inspect", edit(tmp_path / "out", **changes)), 2, message)
