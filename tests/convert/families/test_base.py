"""Every family of the registry: the record means what the family's class computes, and names are where it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import layer_tensors, switched, tiny_config, tiny_model
from written import refused

from attention.errors import Refusal
from attention.record import Attention
from attention.reference import grouped_attention, latent_attention
from convert.families import FAMILIES, family_of
from convert.families.base import unmodelled_fields


def modules(model: Any) -> list[tuple[Any, Any]]:
    """The attention module of every layer, and the layer."""
    family = FAMILIES[model.config.model_type].for_config(model.config)
    paths = [family.module(layer) for layer in range(model.config.num_hidden_layers)]
    return [(model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])) for path in paths]


def attention_calls(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Input of every layer's attention module, and output of its output projection, in one forward pass."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    family = FAMILIES[model.config.model_type].for_config(model.config)
    for layer, (attention, _) in enumerate(modules(model)):
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]),
            with_kwargs=True,
        )
        model.get_submodule(family.output(layer)).register_forward_hook(lambda module, args, out: written.append(out))
    with torch.inference_mode():
        model(torch.randint(4, 96, (2, 20), generator=torch.Generator().manual_seed(0)))
    return list(zip(read, written, strict=True))


WINDOWED: dict[str, Any] = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1, "window_size": 7}
STRAY: dict[str, Any] = WINDOWED | {"layer_types": ["full_attention"] * 3}
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 0.4, "sliding_window": 7}
SETTINGS = [
    *((model_type, on, {}) for model_type in FAMILIES for on in (False, True)),
    *((model_type, True, WINDOWED) for model_type in FAMILIES),  # classes without windows ignore the fields
    *((model_type, True, STRAY) for model_type in ("mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")),
    *((model_type, True, CAPPED) for model_type in ("gemma2", "vaultgemma")),
    ("bloom", True, {"apply_residual_connection_post_layernorm": True}),
    ("bloom", True, {"num_attention_heads": 6, "hidden_size": 48}),
    ("mpt", True, {"num_attention_heads": 6, "hidden_size": 48, "attn_config": {"softmax_scale": 0.7}}),
]


@pytest.mark.parametrize(("model_type", "on", "changes"), SETTINGS)
def test_the_record_computes_what_the_class_computes(model_type: str, on: bool, changes: dict[str, Any]) -> None:
    model = tiny_model(switched(model_type, on, **changes))
    family = FAMILIES[model_type].for_config(model.config)
    for layer, (x, out) in enumerate(attention_calls(model)):
        record = family.split(layer_tensors(model, family, layer), model.config, layer)
        with torch.inference_mode():
            ours = grouped_attention(x, record) if isinstance(record, Attention) else latent_attention(x, record)
        assert (ours - out).norm() / out.norm() < 3e-6, f"layer {layer}"


@pytest.mark.parametrize("on", [False, True], ids=["plain", "switched"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_shapes_name_every_attention_tensor(model_type: str, on: bool) -> None:
    model = tiny_model(switched(model_type, on))
    family = FAMILIES[model_type].for_config(model.config)
    inside = tuple(f"{family.module(layer)}." for layer in range(model.config.num_hidden_layers))
    there = {name: tuple(t.shape) for name, t in model.state_dict().items() if name.startswith(inside)}
    named = {}
    for layer in range(model.config.num_hidden_layers):
        named |= family.shapes(model.config, layer)
    assert named == there


def test_an_unknown_family_is_refused_with_the_list() -> None:
    with pytest.raises(Refusal, match="'bert' is not supported") as caught:
        family_of("bert")
    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in ("llama", "qwen3", "phi"))


def test_what_is_not_read_on_purpose_is_refused_with_the_reason() -> None:
    with pytest.raises(Refusal, match=r"openai-gpt' is not supported: .*keeps no KV cache"):
        family_of("openai-gpt")


def test_quantised_experts_are_refused_before_weights_are_read(convert: Any, tmp_path: Any) -> None:
    """As OpenAI publishes them, in a file that nothing here opens."""
    tiny_config("gpt_oss", quantization_config={"quant_method": "mxfp4"}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    refused(convert("mqa", tmp_path, tmp_path / "out"), 2, "is quantised (mxfp4)")
    assert "it is quantised (mxfp4), which a conversion refuses" in convert("plan", tmp_path).output


# ---- around the attention --------------------------------------------------------------------------------------------


def around(model: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What goes into every layer, and into its attention, in one forward pass."""
    layers: list[torch.Tensor] = []
    attentions: list[torch.Tensor] = []

    def keep(into: list[torch.Tensor]) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            into.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return hook

    for attention, layer in modules(model):
        layer.register_forward_pre_hook(keep(layers), with_kwargs=True)
        attention.register_forward_pre_hook(keep(attentions), with_kwargs=True)
    with torch.inference_mode():
        model(torch.randint(4, 96, (2, 20), generator=torch.Generator().manual_seed(0)))
    return layers, attentions


def normalised(x: torch.Tensor, centred: bool) -> torch.Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if centred else x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_norm_before_the_attention_is_the_one_that_is_named(model_type: str) -> None:
    model, family = tiny_model(switched(model_type, True)), FAMILIES[model_type]
    state = model.state_dict()
    for layer, (stream, x) in enumerate(zip(*around(model), strict=True)):
        norm, found = family.input_norm(layer), []
        for centred in (False, True):
            hat = normalised(stream, centred)
            if norm is not None:
                hat = hat * (state[f"{norm.name}.weight"].double() + norm.gain_offset)
                if f"{norm.name}.bias" in state:
                    hat = hat + state[f"{norm.name}.bias"].double()
            found.append(hat)
        if norm is None:
            found.append(stream.double())
        distance = min(float((hat - x.double()).norm() / x.double().norm()) for hat in found)
        assert distance < 1e-3, f"layer {layer}"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_output_module_is_the_one_whose_weight_is_o(model_type: str) -> None:
    model, family = tiny_model(switched(model_type, True)), FAMILIES[model_type]
    for layer in range(model.config.num_hidden_layers):
        record = family.split(layer_tensors(model, family, layer), model.config, layer)
        module = model.get_submodule(family.output(layer))
        assert family.output(layer).startswith(family.module(layer) + ".")
        weight = module.weight.mT if type(module).__name__ == "Conv1D" else module.weight
        assert torch.equal(weight, record.o.flatten(1))
        assert (module.bias is None) == (record.o_bias is None)


def layer_outputs(model: Any, shift: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
    """Of the first layer, if `shift` is added to its input and its output projection gives `constant` less the shift."""
    seen: list[torch.Tensor] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + shift}
        return (args[0] + shift, *args[1:]), kwargs

    _, layer = modules(model)[0]
    output = model.get_submodule(FAMILIES[model.config.model_type].output(0))
    handles = [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        output.register_forward_hook(lambda module, args, out: constant - shift),
        layer.register_forward_hook(lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out)),
    ]
    with torch.inference_mode():
        model(torch.randint(4, 96, (2, 6), generator=torch.Generator().manual_seed(0)))
    for handle in handles:
        handle.remove()
    return seen[0]


@pytest.mark.parametrize("changes", [{}, {"residual_multiplier": 0.5, "use_parallel_residual": True}], ids=["plain", "changed"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_is_said_to_add_its_output_depends_on_the_sum_alone(model_type: str, changes: dict[str, Any]) -> None:
    config = switched(model_type, True, **changes)
    model, family = tiny_model(config), FAMILIES[model_type]
    generator = torch.Generator().manual_seed(2)
    shift, constant = (torch.randn(2, 6, config.hidden_size, generator=generator) for _ in range(2))
    resting, shifted = layer_outputs(model, torch.zeros_like(shift), constant), layer_outputs(model, shift, constant)
    if family.traits(config).adds_output:
        assert float((resting - shifted).norm() / resting.norm()) < 1e-4


# Where a plain sum is only one of the ways in which the class can be set up.
SOMETIMES = {"granite", "granitemoe", "hyperclovax", "stablelm"}


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in SOMETIMES])
def test_what_depends_on_the_sum_alone_is_said_to(model_type: str) -> None:
    """Otherwise a fit would leave unmended what the layers before have lost."""
    config = switched(model_type, True)
    model, family = tiny_model(config), FAMILIES[model_type]
    generator = torch.Generator().manual_seed(2)
    shift, constant = (torch.randn(2, 6, config.hidden_size, generator=generator) for _ in range(2))
    resting, shifted = layer_outputs(model, torch.zeros_like(shift), constant), layer_outputs(model, shift, constant)
    alike = float((resting - shifted).norm() / resting.norm()) < 1e-4
    assert family.traits(config).adds_output == alike


@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe", "qwen3", "smollm3"])
def test_a_window_counts_if_it_is_on(model_type: str) -> None:
    def windows(**changes: Any) -> set[int | None]:
        config = tiny_config(model_type, sliding_window=64, max_window_layers=2, num_hidden_layers=4, **changes)
        return {FAMILIES[model_type].scoring(config, layer).window for layer in range(config.num_hidden_layers)}

    assert 64 in windows(use_sliding_window=True)
    assert windows(use_sliding_window=False) == {None}


def test_local_layers_have_windows() -> None:
    local, plain = tiny_config("gpt_neo", window_size=64), tiny_config("gpt_neo", attention_types=[[["global"], 3]])
    family = FAMILIES["gpt_neo"]
    assert [family.scoring(local, layer).window for layer in range(3)] == [64, None, None]
    assert [family.scoring(plain, layer).window for layer in range(3)] == [None] * 3


def test_a_cap_that_the_class_ignores_is_refused(convert: Any, tmp_path: Any) -> None:
    tiny_config("gemma3_text", attn_logit_softcapping=50.0).save_pretrained(tmp_path)
    refused(convert("mqa", tmp_path, tmp_path / "out"), 2, "attn_logit_softcapping, which its class of transformers ignores")


def test_attention_is_known_but_for_what_no_record_says() -> None:
    known = tiny_config("gemma2", attn_logit_softcapping=50.0, sliding_window=8)
    assert unmodelled_fields(FAMILIES["gemma2"].traits(known)) == []
    both_ways = tiny_config("gemma2", use_bidirectional_attention=True)
    assert unmodelled_fields(FAMILIES["gemma2"].traits(both_ways)) == ["use_bidirectional_attention"]
