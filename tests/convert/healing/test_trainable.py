"""What trains and what stays; gradients through a neutral norm are those of no norm; LoRA begins as the student."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from records import factored
from tiny import random_model, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from attention.reference import latent_attention
from convert.families import FAMILIES, family_of
from convert.families.latent import constants
from convert.healing.plan import named
from convert.healing.trainable import Trainable, compute_layers_again, fixed
from convert.planning.allowed import readable
from eval.inputs.source import Source

LAYER = "model.layers.0.self_attn."
IDS = torch.arange(4, 60).view(2, 28)
Results = Callable[[str], Path]


def trained(model: Any, names: Iterable[str]) -> list[str]:
    Trainable(model, names)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def latent_model(**changes: Any) -> Any:
    return tiny_model(tiny_config("deepseek_v3", **changes))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_attention_and_the_norms_before_it_train(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type))
    family = family_of(model_type).of(model.config)
    names = trained(model, named(model, family, range(3), "attention"))
    assert all(f"{family.module(layer)}." in " ".join(names) for layer in range(3))
    others = [name for name in names if not any(name.startswith(f"{family.module(layer)}.") for layer in range(3))]
    norms = {norm.name.removesuffix(".weight") for layer in range(3) if (norm := family.input_norm(layer)) is not None}
    assert {name.rpartition(".")[0] for name in others} == norms
    assert set(names) <= set(trained(model, named(model, family, range(3), "all")))


def test_constants_of_a_latent_stay_and_all_else_trains() -> None:
    model = latent_model()
    rank, count = 16, len(constants(16))
    still = {name.removeprefix(LAYER): mask for name, mask in fixed(model).items() if name.startswith(LAYER)}
    assert set(still) == {"kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "kv_a_layernorm.weight"}
    rows = still["kv_a_proj_with_mqa.weight"]
    assert rows.shape == (rank + 8, 64)
    assert rows[:count].all()
    assert not rows[count:].any()
    assert still["kv_a_proj_with_mqa.bias"].tolist() == [True] * rank + [False] * 8  # the RoPE key has biases
    names = trained(model, named(model, family_of("deepseek_v3").of(model.config), range(3), "attention"))
    assert f"{LAYER}kv_a_layernorm.weight" not in names
    assert f"{LAYER}kv_a_proj_with_mqa.bias" in names


def test_constants_stay_beside_channels_with_biases() -> None:
    model = latent_model()
    count = len(constants(16))
    down = model.get_submodule(f"{LAYER}kv_a_proj_with_mqa")
    with torch.no_grad():
        down.bias[count] = 0.1
    still = fixed(model)
    assert still[f"{LAYER}kv_a_proj_with_mqa.weight"][:count].all()
    assert still[f"{LAYER}kv_a_proj_with_mqa.bias"].tolist() == [True] * count + [False] + [True] * (15 - count) + [False] * 8


def test_a_norm_that_does_something_trains() -> None:
    model = random_model(tiny_config("deepseek_v3"))
    assert fixed(model) == {}
    assert f"{LAYER}kv_a_layernorm.weight" in trained(model, named(model, family_of("deepseek_v3"), range(3), "attention"))


def test_queries_that_carry_biases_keep_their_latent() -> None:
    model = latent_model(q_lora_rank=80)
    still = {name.removeprefix(LAYER): mask for name, mask in fixed(model).items() if name.startswith(LAYER)}
    assert still["q_a_proj.weight"].all()  # an identity
    assert still["q_a_proj.bias"].all()
    assert still["q_a_layernorm.weight"].all()


def test_gradients_through_a_neutral_norm_are_the_references() -> None:
    """The reference has no norm, and no constants. The class computes cosines, norms and softmax in fp32."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    model = random_model(tiny_config("deepseek_v3")).double()
    attention, config, family = model.model.layers[0].self_attn, model.config, family_of("deepseek_v3").of(model.config)
    spec, channels = family.spec, config.kv_lora_rank - len(constants(config.kv_lora_rank))
    a = factored(spec.num_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim // 2, channels, 64, value=spec.head_dim)
    a = dataclasses.replace(a, q_nope_bias=None, q_rope_bias=None, rotary=family.rotary(0), scale=family.scale)
    leaves = {name: x.double().requires_grad_() for name, x in vars(a).items() if isinstance(x, torch.Tensor)}
    record = dataclasses.replace(a, **leaves)
    written = {name.removeprefix(LAYER): tensor for name, tensor in family.join(record, spec, 0).items()}
    attention.load_state_dict({name: tensor.detach() for name, tensor in written.items()})
    x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    mask = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    direction = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    out = attention(x, DeepseekV3RotaryEmbedding(config)(x, torch.arange(6)[None]), mask)[0]
    (out * direction).sum().backward()
    made = {name: tensor for name, tensor in written.items() if tensor.requires_grad}
    pulls = [attention.get_parameter(name).grad for name in made]
    found = torch.autograd.grad(list(made.values()), list(leaves.values()), pulls, retain_graph=True)
    expected = torch.autograd.grad((latent_attention(x, record) * direction).sum(), list(leaves.values()))
    for name, one, other in zip(leaves, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()), msg=name)


@pytest.mark.parametrize("model_type", ["opt", "gpt2", "llama", "biogpt", "xglm", "gpt_neox", "falcon"])
def test_nothing_is_dropped(model_type: str) -> None:
    keys = ("dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "activation_dropout")
    model = random_model(tiny_config(model_type, **dict.fromkeys(keys, 0.5))).eval()
    compute_layers_again(model)
    ids = torch.arange(4, 20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=True).requires_grad_(False)


def adapted(path: Path, rank: int = 4) -> tuple[Any, Trainable, list[str]]:
    model = loaded(path)
    names = trained(model, named(model, readable(Source.parse(str(path), True)), range(3), "lora"))
    return model, Trainable(model, names, rank, 0), names


@pytest.mark.parametrize("kind", ["mqa", "mla", "qwen2 mla", "gpt2 mqa", "gpt2 mla", "gpt_neox mqa", "qwen3 mla"])
def test_its_products_are_written_into_the_matrices(kind: str, results: Results) -> None:
    plain, (model, what, names) = loaded(results(kind)), adapted(results(kind))
    with torch.no_grad():
        start = model(IDS, use_cache=False).logits
        assert torch.equal(start, plain(IDS, use_cache=False).logits)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
        found, written = model(IDS, use_cache=False).logits, what.written(weights)
        assert set(written) == set(names)
        for name, parameter in plain.named_parameters():
            parameter.copy_(written.get(name, parameter))
        assert float((found - start).abs().max()) > 0.01
        torch.testing.assert_close(plain(IDS, use_cache=False).logits, found, rtol=0, atol=1e-4)
        for name, parameter in what.as_parameters(written).items():
            model.get_parameter(name).copy_(parameter)
        torch.testing.assert_close(model(IDS, use_cache=False).logits, plain(IDS, use_cache=False).logits, rtol=0, atol=1e-6)


def test_every_matrix_of_attention_has_a_gradient_and_steps_of_its_size(results: Results) -> None:
    model, what, names = adapted(results("mla"))
    model(IDS, use_cache=False).logits.square().sum().backward()
    of_b = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert len(of_b) == sum(
        parameter.ndim == 2 for name, parameter in loaded(results("mla")).named_parameters() if name in names
    )
    assert all(grad is not None and bool(grad.any()) for grad in of_b.values())
    for name in of_b:
        size = model.get_parameter(f"{name.partition('.lora_')[0]}.base_layer.weight").square().mean().sqrt()
        assert what.scales[name] == pytest.approx(max(1, float(size) / 0.02))
