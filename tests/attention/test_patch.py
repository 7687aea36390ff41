"""Absorbing one model object, and nothing else; giving it back as it was; refusing what would come out wrong."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from tiny import tiny_config, tiny_model
from tiny_mla import error, logits, mla_model, tokens
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import attention
from attention import absorb, absorbed, load, restore
from attention.errors import Failure, Refusal
from attention.latent import LatentAttention, StockLatentAttention


def classes(model: Any) -> set[type]:
    return {type(layer.self_attn) for layer in model.model.layers}


def is_absorbed(model: Any) -> bool:
    return all(isinstance(layer.self_attn, LatentAttention) for layer in model.model.layers)


def state(model: Any) -> list[dict[str, Any]]:
    """Everything the attention modules hold, but for the order."""
    return [dict(vars(layer.self_attn)) for layer in model.model.layers]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3", "youtu"])
def test_absorb_and_restore_change_one_model_and_only_its_classes(model_type: str) -> None:
    model, other = mla_model(model_type), mla_model(model_type)
    stock, before = classes(model), state(model)
    keys, functions = list(model.state_dict()), dict(ALL_ATTENTION_FUNCTIONS)
    assert absorb(model) is model
    assert is_absorbed(model)
    assert all(issubclass(cls, next(iter(stock))) for cls in classes(model))  # transformers' own hooks find it
    assert classes(other) == stock
    assert list(model.state_dict()) == keys
    assert dict(ALL_ATTENTION_FUNCTIONS) == functions
    assert restore(model) is model
    assert classes(model) == stock
    assert [{k: v for k, v in s.items() if not isinstance(v, dict)} for s in state(model)] == [
        {k: v for k, v in s.items() if not isinstance(v, dict)} for s in before
    ]
    assert not any("constant_channels" in str(s["_buffers"]) for s in state(model))


def test_absorb_and_restore_may_be_repeated() -> None:
    model = mla_model()
    absorb(absorb(model))
    assert is_absorbed(model)
    assert {cls.__bases__ for cls in classes(model)} == {(StockLatentAttention, DeepseekV3Attention)}
    restore(restore(model))
    assert classes(model) == {DeepseekV3Attention}


@pytest.mark.parametrize("failing", [False, True])
def test_absorbed_leaves_the_model_as_it_was(failing: bool) -> None:
    model = mla_model()
    try:
        with absorbed(model) as same:
            assert same is model
            assert is_absorbed(model)
            if failing:
                raise KeyError
    except KeyError:
        pass
    assert classes(model) == {DeepseekV3Attention}


def test_absorbed_inside_absorbed_gives_back_the_outer_choice() -> None:
    model = absorb(mla_model(), when="never")
    rule = model.model.layers[0].self_attn.rule
    with absorbed(model, when="always"):
        assert model.model.layers[0].self_attn.rule is not rule
    assert is_absorbed(model)
    assert model.model.layers[0].self_attn.rule is rule


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
    assert count("never") == 3 * layers
    assert count(lambda queries, cached, *_: cached > 61) == 2 * layers
    model.set_attn_implementation("eager")
    assert count("auto") == layers
    assert count("always") == 0


def test_save_pretrained_writes_the_stock_checkpoint(tmp_path: Path) -> None:
    model = mla_model()
    model.save_pretrained(tmp_path / "stock")
    absorb(model).save_pretrained(tmp_path / "absorbed")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "absorbed").iterdir())
    for name in names:
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "absorbed" / name).read_bytes()
    loaded = load(tmp_path / "absorbed", dtype=torch.float32, attn_implementation="sdpa", when="always")
    assert is_absorbed(loaded)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "absorbed", dtype=torch.float32)
    assert classes(stock) == {DeepseekV3Attention}
    assert error(logits(loaded.eval(), tokens(2, 20)), logits(stock.eval(), tokens(2, 20))) < 1e-5


def test_fp16_is_loaded_as_it_overflows(tmp_path: Path) -> None:
    model = mla_model(size=2.0**20)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=torch.float16)
    assert loaded.model.layers[0].self_attn.kv_a_layernorm.weight.isinf().any()
    assert error(logits(loaded, tokens(2, 20)), logits(model, tokens(2, 20))) < 1e-2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_are_models_of_their_own(copied: Any) -> None:
    model = absorb(mla_model())
    twin = copied(model)
    assert is_absorbed(twin)
    restore(model)
    assert is_absorbed(twin)
    assert torch.equal(logits(twin, tokens(1, 14)), logits(absorb(model), tokens(1, 14)))


def test_loaded_weights_are_used() -> None:
    model, other = absorb(mla_model()), mla_model(seed=1)
    model.load_state_dict(other.state_dict())
    assert error(logits(model, tokens(1, 14)), logits(other, tokens(1, 14))) < 1e-5


@pytest.mark.parametrize("order", ["hook, absorb", "absorb, hook"])
def test_hooks_of_accelerate_call_the_class_of_the_day(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expansions = mla_model(), []
    stock = DeepseekV3Attention.expand_kv
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", lambda *a: expansions.append(a) or stock(*a))
    expected = logits(model, tokens(1, 14))

    def hook() -> None:
        for layer in model.model.layers:
            add_hook_to_module(layer.self_attn, AlignDevicesHook("cpu"))

    def count() -> int:
        expansions.clear()
        assert error(logits(model, tokens(1, 14)), expected) < 1e-5
        return len(expansions) // len(model.model.layers)

    for act in (hook, lambda: absorb(model)) if order == "hook, absorb" else (lambda: absorb(model), hook):
        act()
    assert count() == 1
    absorb(model)
    assert count() == 1
    restore(model)
    assert count() == 5
    absorb(model)
    for layer in model.model.layers:
        remove_hook_from_module(layer.self_attn)
    assert count() == 1
    restore(model)
    assert count() == 5
    absorb(model)
    assert count() == 1


def refused(model: Any, **options: Any) -> tuple[str, str | None]:
    before = [type(module) for module in model.modules()]
    with pytest.raises(Refusal) as caught:
        absorb(model, **options)
    assert [type(module) for module in model.modules()] == before  # all or nothing
    return str(caught.value), caught.value.hint


def test_a_model_without_latent_attention_is_refused() -> None:
    message, hint = refused(tiny_model(tiny_config("llama")))
    assert message == (
        "LlamaForCausalLM has no latent attention that can be absorbed: "
        "none of its modules is a DeepseekV3Attention, MiniCPM3Attention, YoutuAttention, or KvfoldLatentAttention"
    )
    assert hint.endswith("convert others with `convert mla`, or run them as they are")
    assert restore(tiny_model(tiny_config("llama"))) is not None


def test_a_subclass_with_a_forward_of_its_own_is_not_stock() -> None:
    class Other(DeepseekV3Attention):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = mla_model()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Other
    assert "has no latent attention that can be absorbed" in refused(model)[0]


def test_an_unknown_choice_is_refused() -> None:
    assert refused(mla_model(), when="sometimes")[0] == (
        "cannot absorb when='sometimes': it must be a function or one of 'auto', 'always', 'never'"
    )


class Quantised(nn.Linear):
    pass


def as_int8(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
    return linear


def as_subclass(linear: nn.Linear) -> nn.Linear:
    linear.__class__ = Quantised
    return linear


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (as_int8, "Linear with torch.int8 weights of type Parameter"),
        (as_subclass, "Quantised with torch.float32 weights of type Parameter"),
        (lambda linear: nn.Sequential(linear), "Sequential with no weights of type NoneType"),
    ],
)
def test_weights_that_are_not_plain_are_refused(change: Any, kind: str) -> None:
    model = mla_model()
    module = model.model.layers[1].self_attn
    module.kv_b_proj = change(module.kv_b_proj)
    message, hint = refused(model)
    assert message == (
        f"cannot absorb model.layers.1.self_attn.kv_b_proj: it is a {kind}, and must be a plain Linear with floating weights"
    )
    assert hint == "leave kv_b_proj out of quantisation (modules_to_not_convert), or merge the adapters"


def test_a_bias_on_the_expansion_is_refused() -> None:
    model = mla_model()
    model.model.layers[2].self_attn.kv_b_proj.bias = nn.Parameter(torch.ones(88))
    assert refused(model)[0] == "cannot absorb model.layers.2.self_attn.kv_b_proj: it has a bias, and must have none"


def test_a_replaced_forward_is_refused() -> None:
    model = mla_model()
    model.model.layers[0].self_attn.forward = print
    message, hint = refused(model)
    assert message.startswith("cannot absorb model.layers.0.self_attn: something else has replaced its forward by <built-in")
    assert hint == "undo that first"


def test_offloaded_weights_are_a_failure() -> None:
    model = mla_model()
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(Failure) as caught:
        absorb(model)
    assert str(caught.value) == (
        "cannot absorb model.layers.0.self_attn: some of its weights are on the meta device, and must be in memory"
    )
    assert caught.value.hint == "load the model without offloading"
    assert classes(model) == {DeepseekV3Attention}


def test_the_package_exports_its_functions_and_imports_no_torch() -> None:
    assert attention.__all__ == ["absorb", "absorbed", "load", "pack", "restore"]
    with pytest.raises(AttributeError, match="no attribute 'absorbing'"):
        attention.absorbing  # noqa: B018
    code = "import sys, attention; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(attention.__file__).parents[1])
