"""What runs on a GPU has there what it needs: records, rotation, norms, absorbed and packed attention on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from fake_gpu import GPU, REFUSED, devices, fake_gpu, to_gpu
from records import factored, inputs, record, run
from tiny import tiny_config, tiny_model
from tiny_mla import RANK, ROPE, mla_model, tokens
from transformers import DynamicCache

from attention import absorb, pack
from attention.cache import EncodedLayer
from attention.formats import FORMATS
from attention.forward import attention_by_distance, attention_output, output_error
from attention.latent import dense_mask, neutral_constants
from attention.qk_norm import QKNorm
from attention.record import FactoredAttention, Record
from attention.rope import Rotary

X = inputs(20, tokens=6, blocks=1)
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
LONG = Rotary(FREQUENCIES, "half", 1.2, FREQUENCIES / 4, 1)
RECORDS: dict[str, Record] = {
    "MHA": record(4, 1, biased=False),
    "GQA, biased": record(),
    "interleaved, partial": record(nope=3, pairing="interleaved", factor=1.2),
    "no RoPE": record(pairs=0, nope=4),
    "longrope": replace(record(), rotary=LONG),
    **{f"norm: {norm}": record(nope=2, norm=norm) for norm in ("shared", "head", "all", "after")},
    "latent": factored(biased=False),
    "latent, biased": factored(),
}
PARTS = [
    (kind, field.name)
    for kind, types in (("GQA, biased", torch.Tensor), ("norm: head", QKNorm), ("latent, biased", torch.Tensor))
    for field in fields(RECORDS[kind])
    if isinstance(getattr(RECORDS[kind], field.name), types)
]


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the fake GPU are of a class of their own, like quantised ones, which absorbed decoding leaves alone."""
    monkeypatch.setattr("attention.latent.is_plain", lambda module: True)


@pytest.fixture(params=RECORDS.values(), ids=RECORDS)
def a(request: pytest.FixtureRequest) -> Record:
    return request.param


# ---- records -------------------------------------------------------------------------------------------------------


def test_a_record_on_the_gpu_computes_there(a: Record) -> None:
    with fake_gpu():
        on_gpu, x = to_gpu(a), X.to(GPU)
        assert devices(on_gpu) == {"cuda"}
        found = attention_output(on_gpu, x), run(on_gpu, x)
        assert devices(found) == {"cuda"}
        assert isinstance(output_error(on_gpu, to_gpu(record()), x), float)
        if not isinstance(on_gpu, FactoredAttention):
            assert devices(attention_by_distance(on_gpu, x)) == {"cuda"}


@pytest.mark.parametrize("computed", [attention_output, run])
@pytest.mark.parametrize(("kind", "part"), PARTS, ids=[f"{kind}: {part}" for kind, part in PARTS])
def test_a_part_left_on_the_cpu_is_noticed(kind: str, part: str, computed: Callable[[Record, torch.Tensor], Any]) -> None:
    a = RECORDS[kind]
    with fake_gpu(), pytest.raises(RuntimeError, match=REFUSED):
        computed(replace(to_gpu(a), **{part: getattr(a, part)}), X.to(GPU))


def test_an_input_left_on_the_cpu_is_noticed(a: Record) -> None:
    with fake_gpu():
        for computed in (attention_output, run):
            with pytest.raises(RuntimeError, match=REFUSED):
                computed(to_gpu(a), X)


@pytest.mark.parametrize(
    "latent", [factored(), factored(biased=False), replace(factored(), q_rope_bias=None)], ids=["biased", "unbiased", "in part"]
)
def test_a_latent_expands_on_the_gpu(latent: FactoredAttention) -> None:
    with fake_gpu():
        expanded = to_gpu(latent).expanded()
        assert devices(expanded) == {"cuda"}
        assert devices(attention_output(expanded, X.to(GPU))) == {"cuda"}


# ---- rotation and norms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotation_takes_its_frequencies_from_anywhere(pairing: Any) -> None:
    with fake_gpu():
        rotary = replace(LONG, pairing=pairing)
        rows, positions = torch.ones(2, 8, 5).to(GPU), torch.arange(5).to(GPU)
        there = replace(rotary, frequencies=FREQUENCIES.to(GPU), long_frequencies=FREQUENCIES.to(GPU))
        for turning in (rotary, there, rotary.select([0, 2], pairing)):
            rotation = turning.rotation(positions, torch.float32)
            for states in (
                turning.rotate(rows.mT, positions),
                rotation.adjoint(rows.mT),
                rotation.of(slice(2))(rows.mT[:, :2]),
            ):
                assert states.device == GPU
            numbers, nope = turning.to_complex(rows)
            assert devices([numbers, nope, turning.from_complex(numbers, nope)]) == {"cuda"}
        with pytest.raises(RuntimeError, match=REFUSED):
            rotary.rotate(rows.mT, positions.cpu())


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("scope", ["head", "all"])
def test_norms_compute_where_their_gains_are(scope: Any, kind: Any) -> None:
    gain, states = torch.ones(2, 6), torch.ones(1, 2, 5, 6)
    norm = QKNorm(kind, scope, gain, gain, 1e-6)
    with fake_gpu():
        assert to_gpu(norm)(states.to(GPU)).device == GPU
        for part in ("gain", "bias"):
            with pytest.raises(RuntimeError, match=REFUSED):
                replace(to_gpu(norm), **{part: gain})(states.to(GPU))


# ---- models --------------------------------------------------------------------------------------------------------


class OnGpu:
    """A model as if it had been moved, which runs on fake tensors of its weights and buffers."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.tensors = {name: tensor.to(GPU) for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        known = {"past_key_values": self.cache, "attention_mask": None if mask is None else mask.to(GPU)}
        return torch.func.functional_call(self.model, self.tensors, (ids.to(GPU),), known).logits


def latent_model(**changes: Any) -> Any:
    return mla_model(**({"attention": "sdpa", "num_hidden_layers": 1} | changes))


def grouped_model() -> Any:
    model = tiny_model(tiny_config("llama", num_key_value_heads=2, num_hidden_layers=1))
    model.set_attn_implementation("sdpa")
    return model


def decoded(model: OnGpu, masked: bool) -> set[str]:
    """Where a prefill of four tokens and a step leave logits and the cache."""
    ids, mask = tokens(2, 5), torch.ones(2, 5, dtype=torch.long) if masked else None
    found = [model(ids[:, :4], None if mask is None else mask[:, :4]), model(ids[:, 4:], mask)]
    return devices(found + [part for layer in model.cache.layers for part in (layer.keys, layer.values)])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("neutral", [(4.0,), ()], ids=["neutral", "norm"])
@pytest.mark.parametrize("when", ["always", "never"])
def test_absorbed_attention_decodes_on_the_gpu(when: Any, neutral: tuple[float, ...], attention: str, masked: bool) -> None:
    model = absorb(latent_model(neutral=neutral, attention=attention), when=when, backend="torch")
    with fake_gpu():
        assert decoded(OnGpu(model), masked) == {"cuda"}


@pytest.mark.parametrize("masked", [False, True])
def test_packed_attention_decodes_on_the_gpu(masked: bool) -> None:
    with fake_gpu():
        assert decoded(OnGpu(pack(grouped_model(), backend="torch")), masked) == {"cuda"}


@pytest.mark.parametrize("part", ["self_attn.constant_channels", "self_attn.kv_b_proj.weight", "self_attn.o_proj.bias"])
def test_a_part_of_a_model_left_on_the_cpu_is_noticed(part: str) -> None:
    model = absorb(latent_model(), when="always", backend="torch")
    with fake_gpu():
        moved, name = OnGpu(model), f"model.layers.0.{part}"
        moved.tensors[name] = moved.tensors[name].cpu()
        with pytest.raises(RuntimeError, match=REFUSED):
            decoded(moved, False)


@pytest.mark.parametrize("kind", ["absorbed", "packed"])
def test_a_cache_left_on_the_cpu_is_noticed(kind: str) -> None:
    ours = (
        absorb(latent_model(), when="always", backend="torch") if kind == "absorbed" else pack(grouped_model(), backend="torch")
    )
    with fake_gpu():
        moved = OnGpu(ours)
        moved(tokens(2, 4))
        layer = moved.cache.layers[0]
        layer.keys = layer.keys.cpu()
        with pytest.raises(RuntimeError, match=REFUSED):
            moved(tokens(2, 1))


def test_constant_channels_are_looked_for_where_the_weights_are() -> None:
    module = latent_model().model.layers[0].self_attn
    answers = [True, False, False, True, True]  # constants, no weights of theirs, one level, large, overflow
    with fake_gpu(answers):
        for child in module.children():
            for name, parameter in list(child.named_parameters()):
                setattr(child, name, None)
                child._parameters[name] = torch.nn.Parameter(parameter.to(GPU), requires_grad=False)
        found = neutral_constants(module)
        assert found is not None
        assert (found.device, found.shape) == (GPU, (RANK + ROPE,))


@pytest.mark.parametrize("queries", [1, 3])
def test_masks_of_flash_attention_become_dense_on_the_gpu(queries: int) -> None:
    with fake_gpu():
        mask = dense_mask(torch.ones(2, 5, dtype=torch.long).to(GPU), queries, torch.ones(2, 8, 16).to(GPU))
        assert devices(mask) == {"cuda"}


@pytest.mark.parametrize("form", ["fp8", "int8", "int4", "int3", "int2", "float16"])
@pytest.mark.parametrize("kind", ["absorbed", "packed"])
def test_encoded_caches_are_decoded_on_the_gpu(kind: str, form: str) -> None:
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    model = (
        absorb(latent_model(**sizes), when="always", backend="torch")
        if kind == "absorbed"
        else pack(grouped_model(), backend="torch")
    )
    with fake_gpu():
        moved = OnGpu(model)
        moved.cache.layers = [EncodedLayer(FORMATS[form], kind == "absorbed")]
        moved.cache.layer_class_to_replicate = None
        found = [moved(tokens(2, size)) for size in (4, 1, 1)]
        assert devices(found) == {"cuda"}
        assert moved.cache.get_seq_length() == 6
