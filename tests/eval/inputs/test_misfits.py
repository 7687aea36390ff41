"""What lies in place of a checkpoint, or of a tensor of its class, is named."""

import json
import pickle
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tiny import tiny_config, tiny_model
from written import Make, damage, edit

import attention
from attention.errors import Failure, Refusal
from eval.inputs.loading import load
from eval.inputs.misfits import OTHER_MODEL, found_among, instead_of, names_in
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


def laid(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    return path


FOUND = {
    ("adapter_config.json", "adapter_model.safetensors"): ("an adapter (adapter_config.json)", "merge_and_unload()"),
    ("params.json", "consolidated.00.pth"): ("their maker's own layout (consolidated.00.pth)", "transformers' layout"),
    ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"): (
        "shards without an index (….index.json), which says what each of them holds (model-00001-of-00002.safetensors, m",
        "get the index from where they came from",
    ),
    ("model.safetensors", "tokenizer.json"): ("weights alone (model.safetensors)", "get config.json"),
    ("model.fp16.safetensors",): ("weights under another name (model.fp16.safetensors)", "rename them to model.safetensors"),
    ("a.gguf", "b.gguf", "c.gguf", "d.gguf"): ("GGUF files (a.gguf, b.gguf, c.gguf, …)", "name one of them"),
    ("zero_to_fp32.py", "latest"): ("a state of DeepSpeed", "zero_to_fp32.py"),
    ("step-1/config.json", "step-2/config.json"): ("checkpoints one level deeper (step-1/config.json, st", "name one of them"),
}


@pytest.mark.parametrize("names", FOUND, ids=lambda names: names[0])
def test_what_lies_there_is_named(names: tuple[str, ...], tmp_path: Path) -> None:
    what, step = FOUND[names]
    with pytest.raises(Refusal) as caught:
        _ = Source.parse(str(laid(tmp_path, *names))).raw
    assert str(caught.value).startswith(f"{tmp_path} has no config.json: it holds ")
    assert what in str(caught.value)
    assert step in str(caught.value.hint)


def test_what_is_not_known_is_not_named(tmp_path: Path) -> None:
    assert found_among(names_in(laid(tmp_path, "config.json", "notes.txt", "deep/er/config.json"))) is None


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    """Where peft is installed, transformers would add it to the weights, and a conversion would not."""
    source = Source.parse(str(laid(tmp_path, "config.json", "adapter_config.json", "model.safetensors")))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(Refusal, match=r"holds an adapter beside its model \(adapter_config\.json\)") as caught:
        _ = source.config
    assert caught.value.hint == "merge it, or, if the weights have it already, take adapter_config.json out"
    with pytest.raises(Refusal, match="an adapter beside its model"):
        attention.load(tmp_path)


def test_an_adapter_in_a_repository_of_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, allow_patterns: list[str], **__: Any) -> str:
        return str(tmp_path / ("config" if allow_patterns == ["config.json"] else "whole"))

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repository, revision: ["model.safetensors"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for directory in (laid(tmp_path / "config", "config.json"), laid(tmp_path / "whole", "config.json", "adapter_config.json")):
        (directory / "config.json").write_text('{"model_type": "llama"}')
    source = Source.parse("nobody/tiny")
    assert source.config.model_type == "llama"
    with pytest.raises(Refusal, match="nobody/tiny holds an adapter beside its model"):
        _ = source.files


def test_a_repository_of_the_hub_is_named_by_its_list_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["model-q4.gguf", "README.md"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "nothing"))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repository, revision: files)
    with pytest.raises(Refusal, match=r"nobody/tiny has no config\.json: it holds GGUF files \(model-q4\.gguf\)") as caught:
        _ = Source.parse("nobody/tiny").raw
    assert str(caught.value.hint) == "name one of them as MODEL: DIR/FILE.gguf"
