"""kvfold's class as an output class: what it is for, its config, and results that load without kvfold."""

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import decodes_alike
from held import BEHIND, IGNORING, MIXED
from latents import same_logits
from rows import rows
from safetensors.torch import save_file
from tiny import ROPES, SWITCHES, switched, tiny_config
from tiny_mla import tokens
from transformers import AutoModelForCausalLM
from written import (
    Convert,
    Logits,
    Make,
    damage,
    edit,
    is_a_copy,
    left_nothing,
    ok,
    read,
    refused,
    same_but_for_the_run,
    weights,
)

from attention import load
from attention.errors import Refusal
from attention.models import CODE, MODEL_TYPE
from attention.qk_norm import NormForm
from attention.spec import AttentionSpec
from convert.families import FAMILIES, family_of
from convert.hosts.kvfold import HOST, LATENT_HOST
from convert.hosts.sharing import PHI
from convert.hosts.source_class import HOST as SOURCE
from convert.planning.allowed import readable
from eval.inputs.source import Source


def test_it_is_for_sources_whose_class_cannot_share_heads() -> None:
    expected = {"biogpt", "bloom", "falcon", "gpt_neox", "gpt_neo", "gpt2", "gpt_bigcode", "mpt", "opt", "xglm"}
    assert set(IGNORING) == expected, "of others, a stock class can"
    assert expected | BEHIND.keys() == HOST.families
    for name, row in FAMILIES.items():
        family = row.of(tiny_config(name))
        spec = family.spec
        if name in IGNORING:
            assert HOST.refuses(family, spec.grouped(1)) is None
            why = "caches keys and values of all 8 query heads" if name == "falcon" else "ignores num_key_value_heads"
            assert why in str(SOURCE.refuses(family, spec.grouped(2)))
            assert HOST.code == LATENT_HOST.code == CODE
            assert SOURCE.refuses(family, spec) is None, "a copy"
            assert SOURCE.config({"a": 1}, family, spec, None) == {"a": 1}, "a stray key would mislead others"
        elif spec.kv_lora_rank is None and not family.needs_projections:
            assert HOST.refuses(family, spec.grouped(1)), "its own class can"


def test_a_config_nests_the_sources() -> None:
    config = tiny_config("gpt_neox", attention_bias=False)
    family = family_of("gpt_neox").of(config)
    raw = config.to_dict() | {"architectures": ["GPTNeoXForCausalLM"], "own_key": 5, "dtype": "bfloat16"}
    target = family.spec.grouped(2)
    found = HOST.config(raw, family, target, None)
    assert (found["model_type"], found["dtype"], found["qkv_bias"], found["o_bias"]) == (MODEL_TYPE, "bfloat16", False, False)
    assert (found["text_config"]["own_key"], found["text_config"]["num_key_value_heads"]) == (5, 2)
    assert "architectures" not in found["text_config"]
    sized = HOST.sized(raw, family, target)
    layout = HOST.layout(family)
    assert layout.of(sized).spec == target


@pytest.mark.parametrize(
    ("kind", "model_type"),
    rows(product(("safetensors", "bin"), (*IGNORING, "gptj")), [("safetensors", "opt"), ("bin", "gpt2")]),
)
def test_a_base_model_that_was_saved_alone_is_read(
    kind: str, model_type: str, checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    """As GPT-2 is on the Hub: without `transformer.` in the names."""
    source, family = checkpoint(model_type), FAMILIES[model_type]
    whole, embedding, head = logits(source), *map(family.names.holding, ("embedding.weight", "head.weight"))
    assert embedding.name in weights(source)
    alone = {name.removeprefix(f"{family.base}."): tensor for name, tensor in weights(source).items()}
    if kind == "bin":
        (source / "model.safetensors").unlink()
        torch.save({head.name: alone[embedding.name.removeprefix(f"{family.base}.")]} | alone, source / "pytorch_model.bin")
    else:
        save_file(alone, source / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(source), whole)
    ok(convert("gqa", source, tmp_path / "same", "--groups", 8, "--force"))
    assert torch.equal(logits(tmp_path / "same"), whole)
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    assert torch.isfinite(logits(tmp_path / "out")).all()
    renamed = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]["renamed"]
    assert renamed[embedding.name] in weights(tmp_path / "out")


@pytest.mark.parametrize("model_type", rows(["gpt2", "gpt_neo", "gpt_neox"], ["gpt2"]))
def test_masks_of_old_checkpoints_are_dropped_with_a_reason(
    model_type: str, checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path
) -> None:
    source, family = checkpoint(model_type), FAMILIES[model_type]
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()
    modules = [family.output(layer).rpartition(".")[0] for layer in range(3)]
    extra = {f"{module}.bias": mask.clone() for module in modules}
    extra |= {f"{module}.masked_bias": torch.tensor(-1e9) for module in modules}
    damage(source, lambda tensors: tensors.update(extra))
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    dropped = json.loads((tmp_path / "out" / "conversion.json").read_text())["tensors"]["dropped"]
    assert {name: dropped[name] for name in extra} == dict.fromkeys(extra, "the model computes it itself")
    assert not any(name.endswith(family.computed) for name in weights(tmp_path / "out"))
    ok(convert("gqa", source, tmp_path / "same", "--groups", 8, "--force"))
    assert torch.equal(logits(tmp_path / "same"), logits(source))


def test_one_kv_head_is_a_source(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint("gpt_bigcode", multi_query=True)
    ok(convert("mqa", source, tmp_path / "same", "--force"))
    is_a_copy(tmp_path / "same", source)
    ok(convert("mla", source, tmp_path / "latent", "--kv-lora-rank", 16, "--method", "svd"))
    same_logits(logits(tmp_path / "latent"), logits(source))


def test_embeddings_may_be_narrower_than_the_model(
    checkpoint: Make, convert: Convert, logits: Logits, on: list[Any], tmp_path: Path
) -> None:
    source = checkpoint("opt", word_embed_proj_dim=24, duplicated=8)
    ok(convert("mqa", source, tmp_path / "out", *on))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=1e-3, atol=1e-3)
    before, after = weights(source), weights(tmp_path / "out")
    for name in ("model.decoder.project_in.weight", "model.decoder.project_out.weight"):
        assert torch.equal(after[f"model.{name}"], before[name])


def test_windows_inside_attention_are_kept(
    checkpoint: Make, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    source = checkpoint("gpt_neo", duplicated=2, window_size=7)
    ok(convert("gqa", source, tmp_path / "four", "--groups", 4))
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    assert config["inner_windows"] == [7, None, None]
    expected = logits(source)
    torch.testing.assert_close(logits(tmp_path / "four"), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    all_of_it = edit(checkpoint("gpt_neo", name="wide", duplicated=2), window_size=100)
    assert not torch.allclose(logits(all_of_it), expected, atol=1e-2), "24 tokens are more than a window"
    with_text = ["--text", words, "--calibration-tokens", 384]
    said = ok(convert("gqa", source, tmp_path / "two", "--groups", 2, *with_text)).stdout
    assert "only outputs are refitted" not in said, "statistics see the windows"
    again = convert("gqa", tmp_path / "two", tmp_path / "one", "--groups", 1)
    left_nothing(again, 2, "has kvfold's class already (GQA-2), and is not converted again", tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    decodes_alike(model, tokens(2, 20))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, {}) for name in sorted({*IGNORING, *PHI.families})),
        *((n, {"multi_query": True}) for n in ("falcon", "gpt_bigcode")),
    ],
)
def test_kv_heads_that_the_class_ignores_are_refused(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    tiny_config(model_type, **changes).save_pretrained(tmp_path)
    own, have = (1, "its 8 query heads share 1") if changes else (8, "each of its 8 query heads")
    for stray in {4, 8} - {own}:
        with pytest.raises(Refusal, match=f"sets num_key_value_heads to {stray}, which {model_type} ignores: {have}"):
            readable(Source.parse(str(edit(tmp_path, num_key_value_heads=stray))))
    assert readable(Source.parse(str(edit(tmp_path, num_key_value_heads=own)))).model_type == model_type


@pytest.mark.parametrize(
    ("changed", "pairing", "message"),
    [
        ({}, "interleaved", "RoPE pairs neighbouring dims"),
        ({"qk_norm": NormForm("rms", "head", False, False, 1e-6, after_rotary=True)}, "half", "normalised behind RoPE"),
        ({"extra_features": {"attention_bias_scale": 8.0}}, "half", "sets attention_bias_scale to 8.0"),
        ({}, "half", "None"),
    ],
)
def test_what_its_attention_does_not_do_is_refused(
    changed: dict[str, Any], pairing: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["gpt_neox"].of(tiny_config("gpt_neox"))
    traits, rotary = family.traits, family.rotary(0)
    monkeypatch.setattr(type(family), "traits", property(lambda _: dataclasses.replace(traits, **changed)))
    monkeypatch.setattr(type(family), "rotary", lambda *_: dataclasses.replace(rotary, pairing=pairing))
    assert message in str(HOST.refuses(family, family.spec.grouped(2)))


@pytest.mark.parametrize("model_type", sorted(HOST.families | LATENT_HOST.families))
def test_what_it_holds_of_the_source_has_the_sources_dtypes(model_type: str) -> None:
    """Whatever the source calls it, and also where it stores gains and biases wider than projections."""
    changes = BEHIND.get(model_type, {})
    config = switched(model_type, True, **{key: value for key, value in changes.items() if key not in SWITCHES})
    family = FAMILIES[model_type].of(config)

    def wide(name: str) -> bool:
        return "norm" in name or name.endswith(".bias")

    source = {
        name: torch.empty(shape, dtype=torch.float32 if wide(name) else torch.bfloat16, device="meta")
        for name, shape in family.shapes(0).items()
    }
    found = LATENT_HOST.layout(family).dtypes(source, family, 0)
    assert found == {name: torch.float32 if wide(name) else torch.bfloat16 for name in found}
    for part in ("norm", ".bias", ".weight"):
        assert any(part in name for name in found) == any(part in name for name in source)


def test_what_stays_keeps_a_precision_that_the_rest_does_not_have(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("qwen3")
    names = [f"model.layers.1.self_attn.{part}_norm.weight" for part in "qk"]
    kept = {name: f"model.{name}" for name in names}

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if name not in kept}

    tensors = weights(damage(source, narrow))
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--class", "kvfold", "--no-text"))
    assert 'from_pretrained("path/to/this/directory", trust_remote_code=True)' in (tmp_path / "out" / "README.md").read_text()
    found = weights(tmp_path / "out")
    for name, own in kept.items():
        assert torch.equal(found[own].flatten(), tensors[name].flatten())
    assert {name for name, tensor in found.items() if tensor.dtype == torch.float32} == set(kept.values())
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in found.items() if name not in kept.values())


@pytest.mark.parametrize(
    ("model_type", "groups", "kind", "message"),
    [
        ("llama", 2, "kvfold", "kvfold: the source's class can share KV heads, and no norm or clamp comes before them"),
        ("hunyuan_v1_dense", 2, "kvfold", "kvfold: queries and keys are normalised behind RoPE"),
        ("qwen3", 4, "kvfold", "kvfold: no KV heads are shared, and the source's class holds its own"),
        ("gpt2", 2, "stock", "its own class: gpt2 ignores num_key_value_heads"),
    ],
)
def test_a_class_that_cannot_hold_the_result_is_refused(
    model_type: str, groups: int, kind: str, message: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    done = convert("gqa", checkpoint(model_type), tmp_path / "out", "--groups", groups, "--class", kind)
    left_nothing(done, 2, message, tmp_path / "out")
    assert "leave out --class" in done.stderr


@pytest.mark.parametrize(("model_type", "named"), [("qwen3", True), ("hunyuan_v1_dense", False)])
def test_a_plan_names_the_class_that_loses_less_where_it_can_hold_the_result(
    model_type: str, named: bool, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    planned = ok(convert("gqa", checkpoint(model_type), tmp_path / "out", "--groups", 2, "--no-text", "--dry-run")).output
    assert "queries and keys are normalised, which costs in this class" in planned
    assert ("gqa --class kvfold shares keys behind that" in planned) is named


KEEPING = "--kv-lora-rank", 16, "--qk-rope-head-dim", 8, "--keep-layers", "2,0"


def test_layers_that_stay_are_those_of_the_source_bit_for_bit(
    checkpoint: Make, convert: Convert, on: list[Any], letters: Path, tmp_path: Path
) -> None:
    """Also after a healing; and a cache in a format has rows for heads and for the latent, as planned."""
    source, out, healed = checkpoint("llama"), tmp_path / "out", tmp_path / "healed"
    said = ok(convert("mla", source, out, *KEEPING, *on)).stdout
    assert "GQA-4 → MLA-16+8 in 1 of 3 layers" in said
    ok(convert("heal", out, healed, "--text", letters, "--context", 32, "--tokens", 512, "--batch-tokens", 64, "--lr", 7e-5))
    before, after, trained = map(weights, (source, out, healed))
    kept = [name for name in before if "layers.0.self_attn" in name or "layers.2.self_attn" in name]
    assert kept
    assert all(torch.equal(found[f"model.{name}"], before[name]) for name in kept for found in (after, trained))
    changed = [name for name in after if "layers.1.self_attn" in name]
    assert any(not torch.equal(after[name], trained[name]) for name in changed)
    provenance, facts = read(out / "conversion.json"), json.loads(ok(convert("inspect", healed, "--json")).stdout)
    assert provenance["kept_layers"] == facts["kept_layers"] == [0, 2]
    assert [layer.get("kept", False) for layer in provenance["layers"]] == [True, False, True]
    renamed = provenance["tensors"]["renamed"]
    assert {name: renamed[name] for name in kept} == {name: f"model.{name}" for name in kept}
    assert not {*kept} & provenance["tensors"]["dropped"].keys()
    assert facts["attention"] == "MLA-16+8 in 1 of 3 layers"
    ok(convert("run", out, tmp_path / "again"))
    same_but_for_the_run(out, tmp_path / "again")
    left_nothing(convert("gqa", out, tmp_path / "two", "--groups", 2), 2, "has latent attention already", tmp_path / "two")
    for form in ("int8", "int4", "mixed"):
        model = load(out, cache_dtype=form)
        held = sum(layer.nbytes for layer in model(tokens(1, 5)).past_key_values.layers)
        assert held == 5 * AttentionSpec.from_config(model.config).bytes_per_token(form)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept_layers": [3]}, "kept_layers is [3]; it must list layers from 0 to 2"),
        ({"kept_layers": "0"}, "kept_layers is 0; it must list layers"),
        ({"kept_layers": [True]}, "kept_layers is [True]"),
        ({"kv_lora_ranks": [8, 4, 8]}, "kv_lora_ranks is of an earlier version of kvfold"),
        ({"shared_kv_heads": 0}, "shared_kv_heads is 0; it must be an integer above 0, beside kept_layers"),
        (
            {"kept_layers": None, "shared_kv_heads": 2},
            "shared_kv_heads is 2; it must be an integer above 0, beside kept_layers",
        ),
    ],
)
def test_wrong_layers_in_a_config_are_refused(
    changes: dict[str, Any], message: str, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    ok(convert("gqa", checkpoint("llama"), tmp_path / "out", "--groups", 2, "--keep-layers", 1, "--no-text"))
    refused(convert("inspect", edit(tmp_path / "out", **changes)), 2, message)


@pytest.mark.parametrize("model_type", ["cohere2", "exaone4"])
def test_no_rope_key_is_kept_where_only_layers_that_stay_rotate(
    model_type: str, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path
) -> None:
    """As in the layers of these models that see everything."""
    source = checkpoint(model_type, **MIXED)
    ok(convert("mla", source, tmp_path / "out", "--kv-budget", "80%", *on))
    config, model = read(tmp_path / "out" / "config.json"), AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (config["kept_layers"], config["rope_pairs"]) == ([0, 2], [])
    assert "calibrated for" not in (tmp_path / "out" / "README.md").read_text()
    decodes_alike(model, tokens(2, 20))


def test_continuous_batches_of_layers_that_differ_are_refused(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    ok(convert("gqa", checkpoint("llama"), tmp_path / "out", "--groups", 2, "--keep-layers", 1, "--no-text"))
    attention = load(tmp_path / "out").model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="continuous batching has caches of one size"):
        attention(torch.zeros(1, 2, 64), cache=object())


def test_a_class_that_ignores_kept_layers_is_not_counted_by_them() -> None:
    plain, stray = (tiny_config("deepseek_v3", **changes) for changes in ({}, {"kept_layers": [1]}))
    assert AttentionSpec.from_config(plain) == AttentionSpec.from_config(stray)


def test_a_cache_is_computed_anew_where_longrope_changes_its_frequencies(
    checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    """As Phi-3's own class does in generation; one forward pass has the frequencies of its length."""
    source = checkpoint("phi3", original_max_position_embeddings=32, rope_parameters=ROPES["longrope"])
    whole = ("--kv-lora-rank", 32, "--qk-rope-head-dim", 32, "--method", "svd", "--no-text")
    ok(convert("mla", source, tmp_path / "out", *whole))
    before, after = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (source, tmp_path / "out"))
    ids, asked = tokens(1, 25), {"max_new_tokens": 20, "do_sample": False}
    with torch.inference_mode():
        for length in (32, 33, 60):
            torch.testing.assert_close(after(tokens(2, length)).logits, before(tokens(2, length)).logits, rtol=1e-4, atol=1e-4)
        for cached in (True, False):  # transformers 5.19 itself loses the thread where it computes the cache anew
            said = before.generate(ids, use_cache=cached, **asked)
            assert torch.equal(after.generate(ids, use_cache=cached, **asked), said)
