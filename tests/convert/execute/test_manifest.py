"""What is written of which tensors: ties, dropped and renamed tensors, and weights that are not those of the config."""

from pathlib import Path

import pytest
import torch
from plans import factored, grouped
from written import Convert, Find, Logits, Make, damage, edit, left_nothing, ok, read, weights

from convert.execute.manifest import loadable_manifest
from convert.output.destination import Output
from convert.planning.base import Plan
from eval.inputs.source import Source


def planned(path: Path, groups: int | None = None) -> Plan:
    """To fewer heads, or to a latent."""
    source, output = Source.parse(str(path)), Output(path.with_name("planned"))
    return grouped(source, output, groups) if groups else factored(source, output, kv_lora_rank=16, qk_rope_head_dim=8)


def written_of(source: Path, groups: int | None = None) -> tuple[set[str], dict[str, str]]:
    """Names of what a conversion writes; what it drops, with reasons. No weights are read."""
    plan = planned(source, groups)
    manifest = loadable_manifest(plan)
    return set(manifest.infos), manifest.dropped


def test_every_tensor_is_accounted_for_once(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint("olmo2")
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean"))
    provenance = read(tmp_path / "out" / "conversion.json")
    converted, copied = provenance["tensors"]["converted"], provenance["tensors"]["copied"]
    before, after = weights(source), weights(tmp_path / "out")
    assert sorted(converted + copied) == sorted(before)
    assert {name.split("self_attn.")[1] for name in converted} == {"k_proj.weight", "v_proj.weight", "k_norm.weight"}
    assert "inexact" in provenance["notes"][0]
    assert all(torch.equal(before[name], after[name]) for name in copied)


def test_every_tensor_of_a_latent_is_accounted_for_once(finished: Find) -> None:
    made = finished("latent in shards")
    tensors, before, after = made.provenance["tensors"], weights(made.source), weights(made.path)
    assert sorted([*tensors["converted"], *tensors["copied"]]) == sorted(after)
    assert tensors["cast"] == []
    assert set(tensors["dropped"]) == set(before) - set(after)
    assert {name.split("self_attn.")[1] for name in tensors["dropped"]} == {"k_proj.weight", "v_proj.weight"}
    assert set(tensors["dropped"].values()) == {"factored into kv_a_proj_with_mqa and kv_b_proj"}
    assert {name.split("self_attn.")[1] for name in tensors["converted"]} >= {"q_proj.weight", "kv_b_proj.weight"}
    assert all(torch.equal(before[name], after[name]) for name in tensors["copied"])
    assert {name for name in before if "self_attn" not in name} <= set(tensors["copied"])


def test_a_cast_is_not_called_a_copy(shelf: Make, convert: Convert, tmp_path: Path) -> None:
    result = ok(convert("gqa", shelf(), tmp_path / "out", "--groups", 4, "--dtype", "bfloat16"))
    assert "every tensor is cast to bfloat16" in result.stdout
    provenance, made = read(tmp_path / "out" / "conversion.json"), weights(tmp_path / "out")
    assert sorted(provenance["tensors"]["cast"]) == sorted(weights(shelf()))
    assert provenance["tensors"]["converted"] == provenance["tensors"]["copied"] == []
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    assert provenance["kv_bytes_per_token"]["after"] == 3 * 2 * 4 * 8 * 2


def test_heads_that_had_tensors_of_their_own_are_accounted_for(checkpoint: Make) -> None:
    source = checkpoint("stablelm", qk_layernorm=True)
    names, dropped = written_of(source, 2)
    assert names | dropped.keys() == weights(source).keys()
    assert len(dropped) == 3 * 2
    assert not any("q_layernorm" in name for name in dropped)
    assert written_of(source, 4) == (set(weights(source)), {})


@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_stay_tied(tied: bool, checkpoint: Make) -> None:
    source = checkpoint(tie_word_embeddings=tied)
    for groups in (1, None):
        assert ("lm_head.weight" in written_of(source, groups)[0]) == (not tied)
    plan = planned(source, 1)
    assert plan.config(None)["tie_word_embeddings"] == tied


def test_a_pickle_source_becomes_safetensors(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint(duplicated=2, tie_word_embeddings=True)
    tensors, expected = weights(source), logits(source)
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    ok(convert("gqa", source, tmp_path / "out", "--groups", 2))
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)
    assert list(read(tmp_path / "out" / "conversion.json")["tensors"]["dropped"]) == ["lm_head.weight"]
    names, _ = written_of(edit(source, tie_word_embeddings=False), 2)
    assert "lm_head.weight" in names, "an untied head is not dropped for sharing memory in a file"


def test_only_a_tied_head_is_dropped_for_sharing_memory(checkpoint: Make) -> None:
    source = checkpoint(tie_word_embeddings=True)
    tensors = weights(source)
    tensors["model.layers.1.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"]
    torch.save({"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    names, dropped = written_of(source, 2)
    assert (names, list(dropped)) == (tensors.keys(), ["lm_head.weight"]), "the embedding is kept, though the head comes first"


def test_frequencies_that_old_checkpoints_keep_are_left_out(checkpoint: Make) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = damage(checkpoint(), lambda tensors: tensors.update({name: torch.ones(4)}))
    names, dropped = written_of(source)
    assert (name in names, dropped[name]) == (False, "the model computes it itself")
    assert name in written_of(source, 1)[0], "where the class stays the same, it is copied"


K = "model.layers.1.self_attn.k_proj"
BAD = {  # what else a checkpoint may have in place of a tensor, tests/eval/inputs/test_misfits.py says
    "missing tensor": (lambda t: t.pop(f"{K}.weight"), f"lacks tensor {K}.weight"),
    "GPTQ without a config of it": (
        lambda t: t.update({f"{K}.qweight": t.pop(f"{K}.weight").int()}), f"; it has {K}.qweight, as GPTQ and AWQ store",
    ),
    "wrong shape": (
        lambda t: t.update({f"{K}.weight": torch.ones(16, 64)}),
        f"disagree: {K}.weight is [16, 64], by the config it is [32, 64]",
    ),
    "a bias that the config denies": (lambda t: t.update({f"{K}.bias": torch.ones(32)}), f"has tensor {K}.bias, which llama"),
    "more layers than the config": (
        lambda t: t.update({K.replace("1", "3") + ".weight": t[f"{K}.weight"].clone()}),
        "config.json gives 3 layers, and the weights hold model.layers.3.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_leave_nothing_behind(case: str, checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint()
    change, message = BAD[case]
    damage(source, change)
    result = convert("gqa", source, tmp_path / "out", "--groups", 2, "-q")
    left_nothing(result, 1, message, tmp_path / "out")
    assert result.stderr.startswith("error: ")
