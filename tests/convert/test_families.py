"""Every family of the registry: split and join are inverse, and the record means what the family's class computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_config, tiny_model

from attention.errors import Refusal
from attention.reference import grouped_attention
from convert.families import FAMILIES, family_of
from convert.record import Attention

# Everything a family can switch on, on: biases and QK-norms are where records go wrong.
SWITCHES = ("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias", "attention_out_bias", "qk_layernorm", "use_qk_norm")
# In these the class does more than the record says (soft-capped logits), as `beyond` declares.
UNLIKE = {"gemma2": {"attn_logit_softcapping": None}, "vaultgemma": {"attn_logit_softcapping": None}}


def switched(model_type: str, on: bool, **changes: Any) -> Any:
    return tiny_config(model_type, **dict.fromkeys(SWITCHES, on), **UNLIKE.get(model_type, {}), **changes)


def layer_tensors(model: Any, family: Any, layer: int) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: state[name] for name in family.shapes(model.config, layer)}


def attention_calls(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Input and output of every layer's attention module in one forward pass."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, out: calls.append(
                (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], out[0])
            ),
            with_kwargs=True,
        )
    with torch.inference_mode():
        model(torch.randint(4, 96, (2, 20), generator=torch.Generator().manual_seed(0)))
    return calls


@pytest.mark.parametrize("on", [False, True], ids=["plain", "switched"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_record_computes_what_the_class_computes(model_type: str, on: bool) -> None:
    model, family = tiny_model(switched(model_type, on)), FAMILIES[model_type]
    for layer, (x, out) in enumerate(attention_calls(model)):
        record = family.split(layer_tensors(model, family, layer), model.config, layer)
        arguments = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        with torch.inference_mode():
            ours = grouped_attention(x, **arguments)
        assert (ours - out).norm() / out.norm() < 3e-6, f"layer {layer}"


@pytest.mark.parametrize("on", [False, True], ids=["plain", "switched"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_shapes_name_every_attention_tensor(model_type: str, on: bool) -> None:
    model, family = tiny_model(switched(model_type, on)), FAMILIES[model_type]
    there = {name: tuple(t.shape) for name, t in model.state_dict().items() if ".self_attn." in name}
    named = {}
    for layer in range(model.config.num_hidden_layers):
        named |= family.shapes(model.config, layer)
    assert named == there


@pytest.mark.parametrize("model_type", FAMILIES)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_join_is_the_inverse_of_split(model_type: str, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 3), "KV heads")
    share = data.draw(st.integers(1, 3), "query heads per KV head")
    head_dim = 2 * data.draw(st.integers(2, 5), "half of D")
    heads = groups * share
    width = (
        heads * head_dim
        if model_type in ("stablelm", "phi", "olmoe", "helium")
        else heads * data.draw(st.integers(1, 6), "E / H")
    )
    config = tiny_config(
        model_type,
        **{switch: data.draw(st.booleans(), switch) for switch in SWITCHES},
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        hidden_size=width,
    )
    family = FAMILIES[model_type]
    layer = data.draw(st.integers(0, config.num_hidden_layers - 1), "layer")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in family.shapes(config, layer).items()}
    back = family.join(family.split(tensors, config, layer), layer)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_split_copies_nothing_that_a_method_may_leave_alone(model_type: str) -> None:
    model, family = tiny_model(switched(model_type, True)), FAMILIES[model_type]
    tensors = layer_tensors(model, family, 0)
    record: Attention = family.split(tensors, model.config, 0)
    back = family.join(record, 0)
    projections = [name for name in tensors if "_proj" in name or "dense" in name]
    assert projections
    for name in projections:
        assert back[name].data_ptr() == tensors[name].data_ptr(), name


def test_an_unknown_family_is_refused_with_the_list() -> None:
    with pytest.raises(Refusal, match="'bert' is not supported") as caught:
        family_of("bert")
    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in ("llama", "qwen3", "phi"))
