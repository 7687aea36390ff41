"""Stock classes that share heads for others: what they compute of GPT-J's and GPT-2's like, carry, and refuse."""

import json
from pathlib import Path

import torch
from held import GLOBAL
from latents import logits_of
from tiny import VOCABULARY, tiny_config
from tiny_mla import tokens
from written import Convert, Make, damage, edit, left_nothing, ok, read, weights

from convert.families import FAMILIES
from convert.hosts.kvfold import LATENT_HOST
from convert.hosts.sharing import BIGCODE, PHI


def test_a_config_says_what_the_source_does() -> None:
    config = tiny_config(
        "gptj", n_inner=None, resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3, layer_norm_epsilon=1e-3, eos_token_id=[2, 3]
    )
    target = FAMILIES["gptj"].of(config).spec.grouped(2)
    found = PHI.config({"dtype": "bfloat16", "own_key": 5}, FAMILIES["gptj"].of(config), target, None)
    assert "own_key" not in found
    assert (found["model_type"], found["dtype"], found["num_key_value_heads"], found["head_dim"]) == ("phi", "bfloat16", 2, 8)
    assert (found["resid_pdrop"], found["embd_pdrop"], found["attention_dropout"]) == (0.1, 0.2, 0.3)
    assert (found["intermediate_size"], found["layer_norm_eps"], found["hidden_act"]) == (256, 1e-3, "gelu_new")
    assert (found["eos_token_id"], found["max_position_embeddings"]) == ([2, 3], 128)
    assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    sized = PHI.sized({}, FAMILIES["gptj"].of(config), target)
    assert FAMILIES["phi"].of(sized).spec == target
    rotary, expected = FAMILIES["phi"].of(sized).rotary(0), FAMILIES["gptj"].of(config).rotary(0)
    assert torch.equal(rotary.frequencies, expected.frequencies)


def test_masks_of_old_checkpoints_are_dropped_and_all_else_keeps_its_bits(
    checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    source, family = checkpoint("gptj"), FAMILIES["gptj"]
    before, mask = weights(source), torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    extra = {f"{family.module(layer)}.{name}": mask.clone() for layer in range(3) for name in ("bias", "causal_mask")}
    damage(source, lambda tensors: tensors.update(extra))
    ok(convert("mqa", source, tmp_path / "out", "--method", "mean"))
    facts, after = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"], weights(tmp_path / "out")
    assert {name: facts["dropped"][name] for name in extra} == dict.fromkeys(extra, "the model computes it itself")
    assert facts["dropped"][f"{family.module(0)}.out_proj.weight"] == PHI.replaces
    assert facts["renamed"]["transformer.h.2.mlp.fc_in.bias"] == "model.layers.2.mlp.fc1.bias"
    kept = {name for name in before if family.names.place(name)}
    assert all(torch.equal(after[facts["renamed"].get(name, name)], before[name]) for name in kept)
    assert torch.equal(after["model.layers.1.self_attn.dense.weight"], before["transformer.h.1.attn.out_proj.weight"])
    for name in ("q_proj", "k_proj", "v_proj", "dense"):
        assert not after[f"model.layers.1.self_attn.{name}.bias"].any()


def test_what_it_refuses_is_refused_inside_kvfolds_class_too(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = edit(checkpoint("gptj"), pad_token_id=VOCABULARY)
    done = convert("mla", source, tmp_path / "out", "--kv-budget", "50%")
    left_nothing(done, 2, f"kvfold: it is built around phi: pad_token_id is {VOCABULARY}", tmp_path / "out")
    left_nothing(convert("mqa", source, tmp_path / "out"), 2, f"phi: pad_token_id is {VOCABULARY}", tmp_path / "out")


def test_kvfolds_class_is_built_around_it() -> None:
    family = FAMILIES["codegen"].of(tiny_config("codegen"))
    raw = family.config.to_dict() | {"dtype": "bfloat16", "architectures": ["CodeGenForCausalLM"]}
    found = LATENT_HOST.config(raw, family, family.spec.latent(16, 4), family.rotary(0))
    layout = LATENT_HOST.layout(family)
    assert layout.inner == FAMILIES["phi"]
    assert found["attention_path"] == "model.layers.{layer}.self_attn"
    assert (found["dtype"], found["qkv_bias"], found["scaling"], found["rope_pairs"]) == ("bfloat16", False, 8**-0.5, [0, 1])
    assert found["text_config"]["model_type"] == "phi"
    assert not {"architectures", "dtype", "n_head"} & found["text_config"].keys()


def test_fits_run_through_it(checkpoint: Make, convert: Convert, words: Path, tmp_path: Path) -> None:
    """The result's layers are run by its own class while queries, keys, values and outputs are fitted."""
    source = checkpoint("opt")
    with_text = ["--text", words, "--calibration-tokens", 384]
    ok(convert("mqa", source, tmp_path / "out", *with_text))
    assert read(tmp_path / "out" / "config.json")["model_type"] == "gpt_bigcode"
    ok(convert("mqa", source, tmp_path / "plain"))
    expected = logits_of(source, tokens(2, 24))
    far, near = (float((logits_of(tmp_path / name, tokens(2, 24)) - expected).norm()) for name in ("plain", "out"))
    assert near < far


def test_positions_that_only_padding_reads_are_dropped(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("opt")
    said = ok(convert("mqa", source, tmp_path / "out")).stdout
    assert "the first 2 rows of model.decoder.embed_positions.weight are dropped: only padding reads them" in said
    before, after = weights(source)["model.decoder.embed_positions.weight"], weights(tmp_path / "out")["transformer.wpe.weight"]
    assert torch.equal(after, before[2:])


def test_settings_are_carried() -> None:
    dropped = {"resid_pdrop": 0.25, "attn_pdrop": 0.5, "embd_pdrop": 0.125}
    names = {
        "gpt2": dropped,
        "gpt_neo": {"resid_dropout": 0.25, "attention_dropout": 0.5, "embed_dropout": 0.125} | GLOBAL,
        "opt": {"dropout": 0.25, "attention_dropout": 0.5},
    }
    for model_type, changes in names.items():
        more = {} if model_type == "opt" else {"layer_norm_epsilon": 1e-3}
        family = FAMILIES[model_type].of(tiny_config(model_type, **changes, **more))
        sized = BIGCODE.sized({"own_key": 5}, family, family.spec.grouped(1))
        assert family.spec.grouped(1) == FAMILIES["gpt_bigcode"].of(sized).spec
        expected = dropped | ({"embd_pdrop": 0.0} if model_type == "opt" else {})
        assert {name: getattr(sized, name) for name in dropped} == expected
        assert sized.layer_norm_epsilon == (1e-5 if model_type == "opt" else 1e-3)
        assert (sized.n_inner, sized.vocab_size, sized.n_positions, sized.n_layer) == (32, VOCABULARY, 128, 3)
        assert not hasattr(sized, "own_key")
