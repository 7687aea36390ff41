"""A checkpoint that its class would not load whole is refused before any work, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_config
from written import Convert, Make, damage, edit, left_nothing, ok, weights

from attention.errors import Failure
from convert.checkpoint.loadable import require_loadable
from convert.planning.targets import GroupedTarget
from eval.inputs.reader import TensorInfo
from eval.inputs.source import Source

Tensors = dict[str, torch.Tensor]
Infos = dict[str, TensorInfo]

MLP, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"
TARGETS: dict[str, list[Any]] = {
    "gqa": ["--groups", 2],
    "mla": ["--kv-lora-rank", 16, "--qk-rope-head-dim", 8],
    "copy": ["--groups", 4, "--force"],
}


def reshaped(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def disagree(name: str, found: list[int], wanted: list[int]) -> str:
    return f"config.json and the weights disagree: {name} is {found}, by the config it is {wanted}"


# What is done to the weights, what to the config, and what is said.
BROKEN: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "an MLP tensor is missing": (lambda t: t.pop(MLP), {}, f"lacks {MLP}, which LlamaForCausalLM with this config has"),
    "an MLP of another width": (reshaped(MLP, (16, 64)), {}, disagree(MLP, [16, 64], [32, 64])),
    "a norm with an axis too many": (reshaped(NORM, (64, 1)), {}, disagree(NORM, [64, 1], [64])),
    "a norm that is too short": (reshaped(NORM, (32,)), {}, disagree(NORM, [32], [64])),
    "a last norm that is missing": (lambda t: t.pop("model.norm.weight"), {}, "lacks model.norm.weight, which"),
    "MLP biases in the config alone": (
        lambda t: None, {"mlp_bias": True}, "lacks model.layers.0.mlp.gate_proj.bias and 8 others, which LlamaForCausalLM",
    ),
    "a head of its own in the config alone": (
        lambda t: t.pop("lm_head.weight"), {"tie_word_embeddings": False}, "lacks lm_head.weight, which LlamaForCausalLM",
    ),
    "another vocabulary": (lambda t: None, {"vocab_size": 400}, disagree("lm_head.weight", [VOCABULARY, 64], [400, 64])),
    "more layers in the weights": (
        lambda t: t.update({MLP.replace("1", "3"): t[MLP].clone()}), {}, "has tensor model.layers.3.mlp.up_proj.weight, which",
    ),
    "a tensor that no class knows": (
        lambda t: t.update({"model.extra": torch.ones(3)}), {}, "has tensor model.extra, which LlamaForCausalLM with this",
    ),
    "a classifier": (
        lambda t: t.update({"score.weight": t.pop("lm_head.weight")[:1].clone()}), {},
        "lacks lm_head.weight, which LlamaForCausalLM with this config has; it has score.weight, as classifiers",
    ),
    "a classifier with a head": (
        lambda t: t.update({"score.weight": torch.ones(1, 64)}), {},
        "has tensor score.weight, as classifiers and reward models do, which LlamaForCausalLM with this config has not",
    ),
    "a tied head that the config does not tie": (
        lambda t: t.pop("lm_head.weight"), {}, "config.json does not tie the head to the embedding",
    ),
    "an MLP of integers": (
        lambda t: t.update({MLP: torch.ones(32, 64, dtype=torch.int8)}), {}, f"{MLP} holds int8, which means nothing",
    ),
    "keys of integers": (
        lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.ones(32, 64, dtype=torch.int32)}), {},
        "model.layers.1.self_attn.k_proj.weight holds int32, which means nothing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_would_not_load_whole_is_refused(case: str, checkpoint: Make) -> None:
    change, config, message = BROKEN[case]
    source = Source.parse(str(edit(damage(checkpoint(tie_word_embeddings=False), change), **config)))
    with pytest.raises(Failure) as failed:
        require_loadable(source.config, source.reader().infos, "it")
    assert message in str(failed.value)
    assert failed.value.hint
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_refused_before_any_work(
    target: str, checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, _, message = BROKEN["an MLP tensor is missing"]
    source = damage(checkpoint(tie_word_embeddings=False), change)
    monkeypatch.setattr("convert.converting.writing", lambda *_: pytest.fail("the work has begun"))
    result = convert("mla" if target == "mla" else "gqa", source, tmp_path / "out", *TARGETS[target])
    left_nothing(result, 1, message, tmp_path / "out")
    assert len(result.stderr.splitlines()) == 2, "an error and a hint"


def test_an_activation_that_no_class_knows_is_refused_at_the_door(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = edit(checkpoint(), hidden_act="magic")
    result = convert("gqa", source, tmp_path / "out", "--groups", 2)
    left_nothing(result, 1, "'magic'", tmp_path / "out")
    assert not (tmp_path / "out.lock").exists()
    assert len(result.stderr.splitlines()) <= 2


def test_a_tied_head_may_be_stored_or_not(checkpoint: Make, convert: Convert, tmp_path: Path) -> None:
    source = checkpoint(tie_word_embeddings=True)
    assert "lm_head.weight" not in weights(source)
    ok(convert("gqa", source, tmp_path / "without", "--groups", 2))
    damage(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    ok(convert("gqa", source, tmp_path / "with", "--groups", 2))


def test_what_was_written_is_held_against_its_class(
    checkpoint: Make, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GroupedTarget.config
    monkeypatch.setattr(GroupedTarget, "config", lambda self, *given: config(self, *given) | {"intermediate_size": 48})
    result = convert("gqa", checkpoint(), tmp_path / "out", "--groups", 2)
    left_nothing(result, 1, "config.json and the weights disagree: model.layers.0.mlp", tmp_path / "out")


# ---- names, shapes and dtypes alone ----------------------------------------------------------------------------------


@pytest.fixture
def infos(checkpoint: Make) -> Infos:
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in weights(checkpoint("mixtral")).items()}


def test_a_checkpoint_as_its_class_saves_it_is_loadable(infos: Infos) -> None:
    require_loadable(tiny_config("mixtral"), infos, "it")
    halves = {name: TensorInfo(info.shape, torch.bfloat16) for name, info in infos.items()}
    require_loadable(tiny_config("mixtral"), halves, "it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda infos, name: infos.pop(name), "do not fit together"),
        (lambda infos, name: infos.update({name: TensorInfo((16, 60), torch.float32)}), "disagree"),
        (lambda infos, name: infos.update({name: TensorInfo(infos[name].shape, torch.uint8)}), "holds uint8"),
    ],
    ids=["missing", "misshaped", "integers"],
)  # fmt: skip
def test_experts_that_are_stacked_when_they_are_loaded_are_checked(
    change: Callable[[Infos, str], Any], message: str, infos: Infos
) -> None:
    name = next(name for name in infos if ".experts." in name)
    change(infos, name)
    with pytest.raises(Failure, match=message):
        require_loadable(tiny_config("mixtral"), infos, "it")
