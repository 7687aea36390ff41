"""Absorbing one model object, and nothing else; giving it back as it was; refusing what would come out wrong."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tiny import tiny_config, tiny_model
from tiny_mla import logits, mla_model, tokens
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import attention
from attention import absorb, restore
from attention.errors import Failure, Refusal
from attention.latent import is_absorbed


def classes(model: Any) -> set[type]:
    return {type(layer.self_attn) for layer in model.model.layers}


def all_absorbed(model: Any) -> bool:
    return all(is_absorbed(layer.self_attn) for layer in model.model.layers)


def state(model: Any) -> list[dict[str, Any]]:
    """Everything the attention modules hold, but for the order."""
    return [dict(vars(layer.self_attn)) for layer in model.model.layers]


def test_absorb_and_restore_change_one_model_and_nothing_of_transformers() -> None:
    model, other = mla_model(), mla_model()
    stock, before = classes(model), state(model)
    keys, functions = list(model.state_dict()), dict(ALL_ATTENTION_FUNCTIONS)
    assert absorb(absorb(model)) is model
    assert all_absorbed(model)
    assert classes(model) == stock  # transformers' own hooks find it
    assert not all_absorbed(other)
    assert list(model.state_dict()) == keys
    assert functions.items() <= dict(ALL_ATTENTION_FUNCTIONS).items()
    assert restore(restore(model)) is model
    assert state(model) == before


def test_when_chooses_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expansions = mla_model(), []
    stock = DeepseekV3Attention.expand_kv
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", lambda *a: expansions.append(a) or stock(*a))

    def count(when: Any) -> int:
        expansions.clear()
        logits(absorb(model, when=when), tokens(1, 62), chunks=[60])  # 60, 1, 1 tokens
        return len(expansions)

    layers = len(model.model.layers)
    assert count("auto") == count("always") == layers  # no mask tells the absorbed path what the prefill is
    model.set_attn_implementation("eager")
    assert count("auto") == layers
    assert count("always") == 0


class Other(DeepseekV3Attention):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Quantised(nn.Linear):
    pass


NONE = "none of its modules is a DeepseekV3Attention, YoutuAttention, MiniCPM3Attention, or KvfoldLatentAttention"
ABSORB = "cannot absorb model.layers.0.self_attn"
LAST, PLAIN = f"{ABSORB}.kv_b_proj: it", "and must be a plain Linear with floating weights"


@pytest.mark.parametrize(
    ("part", "name", "value", "message", "hint"),
    [
        ("", "__class__", Other, f"has no latent attention that can be absorbed: {NONE}", "convert others with `convert mla`"),
        ("", "forward", print, f"{ABSORB}: something else has replaced its forward by <built-in", "undo that first"),
        ("kv_b_proj", "weight", nn.Parameter(torch.ones(88, 16, dtype=torch.int8), requires_grad=False),
         f"{LAST} is a Linear with torch.int8 weights of type Parameter, {PLAIN}", "quantisation"),
        ("kv_b_proj", "__class__", Quantised, f"{LAST} is a Quantised with torch.float32 weights", "or merge the adapters"),
        ("", "kv_b_proj", nn.Sequential(), f"{LAST} is a Sequential with no weights of type NoneType, {PLAIN}", "quantisation"),
        ("kv_b_proj", "bias", nn.Parameter(torch.ones(88)), f"{LAST} has a bias, and must have none", ""),
    ],
)  # fmt: skip
def test_what_absorption_would_ignore_is_refused(part: str, name: str, value: Any, message: str, hint: str) -> None:
    model = mla_model(num_hidden_layers=1)
    setattr(model.model.layers[0].self_attn.get_submodule(part), name, value)
    before = [type(module) for module in model.modules()]
    with pytest.raises(Refusal) as caught:
        absorb(model)
    assert message in str(caught.value)
    assert hint in (caught.value.hint or "")
    assert [type(module) for module in model.modules()] == before  # all or nothing


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(Refusal, match="cannot absorb when='sometimes': it must be one of 'auto', 'always'"):
        absorb(mla_model(), when="sometimes")  # type: ignore[arg-type]
    assert restore(tiny_model(tiny_config("llama"))) is not None, "there is nothing to undo"


def test_offloaded_weights_are_a_failure() -> None:
    model = mla_model()
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(Failure, match=f"{ABSORB}: some of its weights are on the meta device, and must be in memory") as caught:
        absorb(model)
    assert caught.value.hint == "load the model without offloading"
    assert classes(model) == {DeepseekV3Attention}


def test_the_package_exports_its_functions() -> None:
    assert attention.__all__ == ["absorb", "load", "pack", "restore"]
    with pytest.raises(AttributeError, match="no attribute 'absorbing'"):
        attention.absorbing  # noqa: B018
