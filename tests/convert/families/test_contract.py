"""What every family promises, whatever its layout: each property over every row of the registry.

Tests of one family alone are in the file of that family.
"""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from alike import comes_back
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import REPRESENTATIVES, rows
from tiny import SWITCHES, layer_tensors, switched, tiny_config, tiny_model

from attention.reference import grouped_attention
from convert.calibration.stream import positioned
from convert.families import FAMILIES, Family
from convert.families.rows import ROWS

HEADS = [name for name, family in FAMILIES.items() if family.has_heads]  # a latent is not converted again

# Layouts in which one model type stores its heads in several ways, with how many KV heads share the query heads of each.
LAYOUTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "falcon": [({"new_decoder_architecture": True}, "any"), ({"multi_query": True}, "one"), ({"multi_query": False}, "all")],
    "gpt_bigcode": [({"multi_query": True}, "one"), ({"multi_query": False}, "all")],
}
AS_WIDE = ("stablelm", "phi", "olmoe", "helium")  # their classes want a model as wide as its heads together


def any_size(data: st.DataObject, model_type: str) -> Any:
    """A config of any sizes and switches that the class takes."""
    family = FAMILIES[model_type]
    layout, sharing = data.draw(st.sampled_from(LAYOUTS.get(model_type, [({}, "any" if family.shares_heads else "all")])))
    blocks = 4 if model_type == "codegen" else 1
    groups = data.draw(st.integers(1, 3), "KV heads") * blocks if sharing != "one" else 1
    share = data.draw(st.integers(1, 3), "query heads per KV head") if sharing != "all" else 1
    heads, half = groups * share, data.draw(st.integers(2, 5), "half of D")
    free = family.shares_heads and model_type not in AS_WIDE
    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        "hidden_size": heads * (data.draw(st.integers(1, 6), "E / H") if free else 2 * half),
    }
    sizes |= {"num_key_value_heads": groups, "head_dim": 2 * half} if family.shares_heads else {}
    sizes |= {"num_kv_heads": groups} if layout.get("new_decoder_architecture") else {}
    sizes |= {"rotary_dim": 2} if model_type in ("codegen", "gptj") else {}
    if model_type in ("gpt2", "gpt_bigcode"):
        sizes["scale_attn_weights"] = data.draw(st.booleans(), "scale_attn_weights")
    return tiny_config(model_type, **{switch: data.draw(st.booleans(), switch) for switch in SWITCHES}, **layout, **sizes)


@pytest.mark.parametrize("model_type", HEADS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_join_is_the_inverse_of_split(model_type: str, data: st.DataObject) -> None:
    config = any_size(data, model_type)
    family = FAMILIES[model_type].of(config)
    layer = data.draw(st.integers(0, config.num_hidden_layers - 1), "layer")
    record = comes_back(family, config, layer, data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    spec = family.spec
    assert record.q.shape == (spec.num_heads, spec.head_dim, config.hidden_size)
    assert record.k.shape == record.v.shape == (spec.num_kv_heads, spec.head_dim, config.hidden_size)


@pytest.mark.parametrize("model_type", [row.model_type for row in ROWS if not row.stacked])
def test_a_split_copies_nothing_that_a_method_may_leave_alone(model_type: str) -> None:
    model, family = seen(model_type)[:2]
    tensors = layer_tensors(model, family, 0)
    back = family.join(family.split(tensors, 0), family.spec, 0)
    projections = [name for name in tensors if "_proj" in name or "dense" in name]
    assert projections
    for name in projections:
        assert back[name].data_ptr() == tensors[name].data_ptr(), name


class Seen(NamedTuple):
    """A small model, and what one forward pass gives to every layer, to its attention, and gets of its output projection."""

    model: Any
    family: Family
    layers: list[torch.Tensor]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def layer_of(model: Any, family: Family, layer: int) -> Any:
    return model.get_submodule(family.module(layer).rpartition(".")[0])


def looked_at(model: Any) -> Seen:
    family = FAMILIES[model.config.model_type].of(model.config)
    found = Seen(model, family, [], [], [])

    def keep(into: list[torch.Tensor]) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            into.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return hook

    handles = []
    for layer in range(model.config.num_hidden_layers):
        attention, output = model.get_submodule(family.module(layer)), model.get_submodule(family.output(layer))
        handles += [
            layer_of(model, family, layer).register_forward_pre_hook(keep(found.layers), with_kwargs=True),
            attention.register_forward_pre_hook(keep(found.inputs), with_kwargs=True),
            output.register_forward_hook(lambda module, args, out: found.outputs.append(out)),
        ]
    with torch.inference_mode():
        model(torch.randint(4, 96, (2, 20), generator=torch.Generator().manual_seed(0)))
    for handle in handles:
        handle.remove()
    assert len(found.layers) == len(found.inputs) == len(found.outputs) == model.config.num_hidden_layers
    return found


@functools.cache
def seen(model_type: str, on: bool = True) -> Seen:
    """With every bias and QK-norm on, or all off."""
    return looked_at(tiny_model(switched(model_type, on)))


def computes_what_the_class_computes(found: Seen) -> None:
    model, family = found.model, found.family
    for layer, (x, out) in enumerate(zip(found.inputs, found.outputs, strict=True)):
        record = family.split(layer_tensors(model, family, layer), layer)
        with torch.inference_mode():
            ours = grouped_attention(x, record)
        assert (ours - out).norm() / out.norm() < 3e-6, f"layer {layer}"


@pytest.mark.parametrize("on", [False, True], ids=["plain", "switched"])
@pytest.mark.parametrize("model_type", HEADS)
def test_the_record_computes_what_the_class_computes(model_type: str, on: bool) -> None:
    computes_what_the_class_computes(seen(model_type, on))


WINDOWED: dict[str, Any] = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1, "window_size": 7}
STRAY: dict[str, Any] = WINDOWED | {"layer_types": ["full_attention"] * 3}
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 0.4, "sliding_window": 7}
UNEVEN: dict[str, Any] = {"num_attention_heads": 6, "hidden_size": 48}  # ALiBi's slopes of no power of two
FALCON: list[tuple[str, dict[str, Any]]] = [  # its blocks and norms differ, too
    ("falcon", {"multi_query": True}),
    ("falcon", {"parallel_attn": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}),
]
SETTINGS = [
    *((model_type, WINDOWED) for model_type in HEADS),  # classes without windows ignore the fields
    *((model_type, STRAY) for model_type in ("mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")),
    *((model_type, CAPPED) for model_type in ("gemma2", "vaultgemma")),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("bloom", UNEVEN),
    ("mpt", UNEVEN | {"attn_config": {"softmax_scale": 0.7}}),
    *FALCON,
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    *((name, {"scale_attn_weights": False}) for name in ("gpt2", "gpt_bigcode")),
    ("gpt_bigcode", {"multi_query": True}),
]


@pytest.mark.parametrize(("model_type", "changes"), SETTINGS)
def test_settings_change_the_record_as_they_change_the_class(model_type: str, changes: dict[str, Any]) -> None:
    computes_what_the_class_computes(looked_at(tiny_model(switched(model_type, True, **changes))))


@pytest.mark.parametrize("on", [False, True], ids=["plain", "switched"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_shapes_name_every_attention_tensor(model_type: str, on: bool) -> None:
    model, family = seen(model_type, on)[:2]
    inside = tuple(f"{family.module(layer)}." for layer in range(model.config.num_hidden_layers))
    there = {name: tuple(t.shape) for name, t in model.state_dict().items() if name.startswith(inside)}
    named = {}
    for layer in range(model.config.num_hidden_layers):
        named |= family.shapes(layer)
    assert named == there


@pytest.mark.parametrize("model_type", HEADS)
def test_the_output_module_is_the_one_whose_weight_is_o(model_type: str) -> None:
    model, family = seen(model_type)[:2]
    for layer in range(model.config.num_hidden_layers):
        record = family.split(layer_tensors(model, family, layer), layer)
        module = model.get_submodule(family.output(layer))
        assert family.output(layer).startswith(family.module(layer) + ".")
        weight = module.weight.mT if type(module).__name__ == "Conv1D" else module.weight
        assert torch.equal(weight, record.o.flatten(1))
        assert (module.bias is None) == (record.o_bias is None)


def normalised(x: torch.Tensor, centred: bool) -> torch.Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if centred else x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(("model_type", "changes"), [*((model_type, {}) for model_type in FAMILIES), *FALCON])
def test_the_norm_before_the_attention_is_the_one_that_is_named(model_type: str, changes: dict[str, Any]) -> None:
    found = looked_at(tiny_model(switched(model_type, True, **changes))) if changes else seen(model_type)
    state = found.model.state_dict()
    for layer, (stream, x) in enumerate(zip(found.layers, found.inputs, strict=True)):
        norm, near = found.family.input_norm(layer), []
        for centred in (False, True):
            hat = normalised(stream, centred)
            if norm is not None:
                hat = hat * (state[norm.name].double() + norm.offset)
                if (bias := f"{norm.name.removesuffix('.weight')}.bias") in state:
                    hat = hat + state[bias].double()
            near.append(hat)
        if norm is None:
            near.append(stream.double())
        distance = min(float((hat - x.double()).norm() / x.double().norm()) for hat in near)
        assert distance < 1e-3, f"layer {layer}"


def layer_outputs(model: Any, family: Family, shift: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
    """Of the first layer, if `shift` is added to its input and its output projection gives `constant` less the shift."""
    outputs: list[torch.Tensor] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + shift}
        return (args[0] + shift, *args[1:]), kwargs

    layer, output = layer_of(model, family, 0), model.get_submodule(family.output(0))
    handles = [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        output.register_forward_hook(lambda module, args, out: constant - shift),
        layer.register_forward_hook(lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out)),
    ]
    with torch.inference_mode():
        model(torch.randint(4, 96, (2, 6), generator=torch.Generator().manual_seed(0)))
    for handle in handles:
        handle.remove()
    return outputs[0]


# Where a plain sum is only one of the ways in which the class can be set up.
SOMETIMES = {"granite", "granitemoe", "hyperclovax", "stablelm"}
CHANGED = {"residual_multiplier": 0.5, "use_parallel_residual": True}


@pytest.mark.parametrize("changes", [{}, CHANGED], ids=["plain", "changed"])
@pytest.mark.parametrize("model_type", rows(FAMILIES, (*REPRESENTATIVES, "granite")))
def test_what_is_said_to_add_its_output_depends_on_the_sum_alone(model_type: str, changes: dict[str, Any]) -> None:
    """And what depends on the sum alone is said to: else a fit would leave unmended what the layers before have lost."""
    model = tiny_model(switched(model_type, True, **changes)) if changes else seen(model_type).model
    family, generator = FAMILIES[model_type].of(model.config), torch.Generator().manual_seed(2)
    shift, constant = (torch.randn(2, 6, model.config.hidden_size, generator=generator) for _ in range(2))
    resting, shifted = (layer_outputs(model, family, moved, constant) for moved in (torch.zeros_like(shift), shift))
    alike = float((resting - shifted).norm() / resting.norm()) < 1e-4
    adds = family.traits.adds_output
    assert alike or not adds
    assert adds or not alike or changes or model_type in SOMETIMES


# Positions of the others are learned, counted (ALiBi), or of no use beside windows.
WHOLE = {
    "biogpt", "bloom", "cohere2", "cwm", "exaone4", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo", "ministral",
    "mistral", "mpt", "olmo3", "opt", "vaultgemma", "xglm",
}  # fmt: skip


@pytest.mark.parametrize("model_type", rows(FAMILIES))
def test_positions_skip_where_the_family_says_so(model_type: str) -> None:
    """Tokens before a skip stay, those behind it attend before it, and turn by how far they are from it."""
    config, ids = tiny_config(model_type), torch.arange(4, 16)[None]
    assert FAMILIES[model_type].of(config).skips == (model_type not in WHOLE)
    if model_type in WHOLE:
        return
    model, near, far = tiny_model(config), torch.arange(12)[None].clone(), torch.arange(12)[None].clone()
    near[:, 6:] += 50
    far[:, 6:] += 57
    with torch.inference_mode():
        plain, one, other = (model(ids, use_cache=False, **positioned(at)).logits[0] for at in (None, near, far))
        changed = model(ids + (torch.arange(12) == 2), use_cache=False, **positioned(near)).logits[0]
    torch.testing.assert_close(one[:6], plain[:6], rtol=1e-4, atol=1e-4)
    for found in (plain, other, changed):
        assert (found[6:] - one[6:]).abs().max() > 1e-6
