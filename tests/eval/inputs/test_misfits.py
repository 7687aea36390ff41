"""A checkpoint that lacks a tensor of its class is named for what it has in its place."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_model
from written import Make, damage, edit

from attention.errors import Failure
from eval.inputs.loading import load
from eval.inputs.misfits import OTHER_MODEL, instead_of
from eval.inputs.source import Source

Q, HEAD = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"
ORIGINAL = "convert the original checkpoint"
HEADLESS = "convert the language model that it was made from"

# What is wanted, what is there, whether the head is tied, what is said of it, and the step.
MISFITS: dict[str, tuple[str, list[str], bool, str, str]] = {
    "GPTQ": (Q, [Q.replace("weight", "qweight"), Q.replace("weight", "qzeros")], False, "as GPTQ and AWQ store", ORIGINAL),
    "bitsandbytes": (Q, [f"{Q}.quant_state.bitsandbytes__nf4"], False, "as bitsandbytes stores", ORIGINAL),
    "packed": (Q, [f"{Q}_packed"], False, "as quantised weights are stored", ORIGINAL),
    "adapter": (Q, [Q.replace("weight", "base_layer.weight")], False, "as PEFT names", "model.merge_and_unload()"),
    "module.": (Q, [f"module.{Q}"], False, f"; it has module.{Q}, as DistributedDataParallel names modules", "re.sub"),
    "compiled, with a tied head": (HEAD, ["_orig_mod.model.norm.weight"], True, "as torch.compile names modules", "re.sub"),
    "checkpointed layers": (
        Q, ["model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight"], True,
        "as activation checkpointing names modules", "take that out of all names",
    ),
    "some prefix": (Q, [f"a.b.{Q}"], False, "; it puts a.b. before all names", "n.removeprefix('a.b.')"),
    "base model": (Q, [Q.removeprefix("model.")], False, "as a base model saved without its head does", HEADLESS),
    "tied base model": (Q, [Q.removeprefix("model.")], True, "as a base model", "AutoModelForCausalLM.from_pretrained(DIR)"),
    "classifier": (HEAD, ["score.weight"], False, "it has score.weight, as classifiers and reward models do", "trained from"),
    "reward model": (HEAD, ["v_head.summary.weight"], True, "as classifiers and reward models do", "trained from"),
    "tied key": (HEAD, [], False, "does not tie the head to the embedding", "set tie_word_embeddings to true in config.json"),
    "packed projections": (
        Q, ["model.layers.0.self_attn.W_pack.weight", "other"], False,
        "; it has model.layers.0.self_attn.W_pack.weight in its place", "get the config.json of these weights",
    ),
    "nothing": (Q, ["model.layers.1.self_attn.extra"], False, "", OTHER_MODEL),
    "a tied head": (HEAD, [], True, "", OTHER_MODEL),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_what_a_checkpoint_has_in_place_of_a_tensor(case: str) -> None:
    wanted, there, tied, said, step = MISFITS[case]
    found = instead_of(wanted, there, tied)
    assert said in found[0]
    assert bool(found[0]) == bool(said)
    assert step in found[1]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_an_attention_of_another_machine_is_not_asked_for(key: str, checkpoint: Make) -> None:
    source = Source.parse(str(edit(checkpoint(), **{key: "flash_attention_2"})))
    assert key not in json.dumps(source.raw)
    with load(source, device="cpu") as model:
        assert model.config._attn_implementation == "sdpa"


NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "prefix": (lambda t: [t.update({f"module.{n}": t.pop(n)}) for n in list(t)], {}, "as DistributedDataParallel", "re.sub"),
    "tied": (lambda t: t.pop(HEAD), {"tie_word_embeddings": False}, "does not tie the head to the embedding", "set tie_word"),
    "another shape": (lambda t: t.update({NORM: torch.ones(3)}), {}, f"{NORM} is [3], by the config it is [64]", OTHER_MODEL),
    "ZeRO-3": (lambda t: t.update({NORM: torch.empty(0)}), {}, f"{NORM} is [0], by the config it is [64]", "DeepSpeed's"),
    "heads": (
        lambda t: None, {"num_key_value_heads": 2}, "k_proj.weight is [32, 64], by the config it is [16, 64]", OTHER_MODEL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_an_evaluation_says_so_too(case: str, checkpoint: Make) -> None:
    change, config, said, step = BROKEN[case]
    source = Source.parse(str(edit(damage(checkpoint(tie_word_embeddings=False), change), **config)))
    with pytest.raises(Failure) as caught, load(source, device="cpu"):
        pass
    assert said in str(caught.value)
    assert step in str(caught.value.hint)


def test_experts_that_do_not_fit_together_are_no_riddle(checkpoint: Make) -> None:
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    source = damage(checkpoint("mixtral"), lambda t: t.update({name: t[name][:2].clone()}))
    with pytest.raises(Failure, match="do not fit together as its config says"), load(Source.parse(str(source)), device="cpu"):
        pass


def test_an_evaluation_refuses_a_stale_copy_of_a_tensor(checkpoint: Make) -> None:
    source = checkpoint(shard="20KB")
    first, last = (sorted(source.glob("model-*.safetensors"))[place] for place in (0, -1))
    copied = load_file(first)
    name = min(copied)
    save_file(load_file(last) | {name: copied[name] + 1}, last, {"format": "pt"})
    with pytest.raises(Failure, match=f"both hold tensor {name}, with other values"), load(Source.parse(str(source))):
        pass


def test_a_pickled_model_is_no_weights_and_torch_does_not_say_how_to_run_it(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("llama"))
    model.config.save_pretrained(tmp_path)
    torch.save(model, tmp_path / "pytorch_model.bin", pickle_module=pickle)
    with (
        pytest.raises(Failure, match="is pickled with more than weights, which torch does not load") as caught,
        load(Source.parse(str(tmp_path)), device="cpu"),
    ):
        pass
    assert caught.value.hint == "have who made it save it with save_pretrained, as safetensors"
