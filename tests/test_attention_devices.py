"""What runs on a GPU has there what it needs: records, rotation, norms, absorbed and packed attention on fake CUDA tensors."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from fake_gpu import GPU, REFUSED, devices, fake_gpu, to_gpu
from records import factored, inputs, record, run
from tiny import tiny_config, tiny_model
from tiny_mla import mla_model, tokens
from transformers import DynamicCache

from attention import absorb, pack
from attention.cache import EncodedLayer
from attention.formats import FORMATS
from attention.forward import attention_by_distance, attention_output, output_error
from attention.latent import dense_mask
from attention.qk_norm import QKNorm
from attention.record import FactoredAttention, Record
from attention.rope import Rotary

X = inputs(20, tokens=6, blocks=1)
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
LONG = Rotary(FREQUENCIES, "half", 1.2, FREQUENCIES / 4, 1)
RECORDS: dict[str, Record] = {
    "GQA, biased": record(),
    "interleaved, partial": record(nope=3, pairing="interleaved", factor=1.2),
    "longrope": replace(record(), rotary=LONG),
    **{f"norm: {norm}": record(nope=2, norm=norm) for norm in ("head", "after", "layer")},
    "latent, biased": factored(),
}


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on the fake GPU are of a class of their own, like quantised ones, which absorbed decoding leaves alone."""
    monkeypatch.setattr("attention.latent.is_plain", lambda module: True)


# ---- records -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", RECORDS.values(), ids=RECORDS)
def test_a_record_on_the_gpu_computes_there(a: Record) -> None:
    with fake_gpu():
        on_gpu, x = to_gpu(a), X.to(GPU)
        assert devices(on_gpu) == {"cuda"}
        assert devices([attention_output(on_gpu, x), run(on_gpu, x)]) == {"cuda"}
        assert isinstance(output_error(on_gpu, to_gpu(record()), x), float)
        further = on_gpu.expanded() if isinstance(on_gpu, FactoredAttention) else attention_by_distance(on_gpu, x)
        assert devices(further) == {"cuda"}


@pytest.mark.parametrize("kind", ["GQA, biased", "norm: head", "latent, biased"])
def test_what_is_left_on_the_cpu_is_noticed(kind: str) -> None:
    a = RECORDS[kind]
    with fake_gpu():
        for field in fields(a):
            if isinstance(part := getattr(a, field.name), torch.Tensor | QKNorm):
                with pytest.raises(RuntimeError, match=REFUSED):
                    attention_output(replace(to_gpu(a), **{field.name: part}), X.to(GPU))
        with pytest.raises(RuntimeError, match=REFUSED):
            attention_output(to_gpu(a), X)


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


@pytest.mark.parametrize(
    ("when", "neutral", "attention", "masked"),
    [("always", (4.0,), "sdpa", True), ("always", (), "eager", False), ("auto", (4.0,), "eager", True)],
    ids=str,
)
def test_absorbed_attention_decodes_on_the_gpu(when: Any, neutral: tuple[float, ...], attention: str, masked: bool) -> None:
    model = absorb(latent_model(neutral=neutral, attention=attention), when=when, backend="torch")
    with fake_gpu():
        assert decoded(OnGpu(model), masked) == {"cuda"}


def test_packed_attention_decodes_on_the_gpu() -> None:
    with fake_gpu():
        assert decoded(OnGpu(pack(grouped_model(), backend="torch")), True) == {"cuda"}


def test_a_part_of_a_model_left_on_the_cpu_is_noticed() -> None:
    model = absorb(latent_model(), when="always", backend="torch")
    with fake_gpu():
        moved, name = OnGpu(model), "model.layers.0.self_attn.kv_b_proj.weight"
        moved.tensors[name] = moved.tensors[name].cpu()
        with pytest.raises(RuntimeError, match=REFUSED):
            decoded(moved, False)


def test_masks_of_flash_attention_become_dense_on_the_gpu() -> None:
    with fake_gpu():
        assert devices(dense_mask(torch.ones(2, 5, dtype=torch.long).to(GPU), torch.ones(2, 8, 16).to(GPU))) == {"cuda"}


@pytest.mark.parametrize(("kind", "form"), [("absorbed", "int4"), ("packed", "fp8")])
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
