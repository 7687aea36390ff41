"""What runs on a GPU has there what it needs: records, rotation, norms, absorbed and packed attention on fake CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu import GPU, devices, fake_gpu, to_gpu
from records import blocks_of, factored, inputs, record, run
from tiny import tiny_config, tiny_model
from tiny_mla import mla_model, tokens
from transformers import DynamicCache

from attention import absorb, pack
from attention.cache import EncodedLayer
from attention.formats import FORMATS
from attention.forward import attention_output, output_error
from attention.latent import dense_mask
from attention.record import FactoredAttention, Record
from attention.rope import Rotary
from convert.methods.distances import attention_by_distance

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


@pytest.mark.parametrize("a", RECORDS.values(), ids=RECORDS)
def test_a_record_on_the_gpu_computes_there(a: Record) -> None:
    with fake_gpu():
        on_gpu, x = to_gpu(a), X.to(GPU)
        blocks = blocks_of(x)
        assert devices(on_gpu) == {"cuda"}
        assert devices([attention_output(on_gpu, blocks), run(on_gpu, x)]) == {"cuda"}
        assert isinstance(output_error(on_gpu, to_gpu(record()), blocks), float)
        further = on_gpu.expanded() if isinstance(on_gpu, FactoredAttention) else attention_by_distance(on_gpu, blocks)
        assert devices(further) == {"cuda"}


class OnGpu:
    """A model as if it had been moved, which runs on fake tensors of its weights and buffers."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.tensors = {name: tensor.to(GPU) for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        known = {"past_key_values": self.cache, "attention_mask": None if mask is None else mask.to(GPU)}
        return torch.func.functional_call(self.model, self.tensors, (ids.to(GPU),), known).logits


def decoded(model: OnGpu, masked: bool) -> set[str]:
    """Where a prefill of four tokens and a step leave logits and the cache."""
    ids, mask = tokens(2, 5), torch.ones(2, 5, dtype=torch.long) if masked else None
    found = [model(ids[:, :4], None if mask is None else mask[:, :4]), model(ids[:, 4:], mask)]
    return devices(found + [part for layer in model.cache.layers for part in (layer.keys, layer.values)])


def absorbed(when: Any = "always", **changes: Any) -> Any:
    return absorb(mla_model(**({"num_hidden_layers": 1} | changes)), when=when, backend="torch")


def packed() -> Any:
    model = tiny_model(tiny_config("llama", num_key_value_heads=2, num_hidden_layers=1))
    model.set_attn_implementation("sdpa")
    return pack(model, backend="torch")


@pytest.mark.parametrize(
    ("make", "masked"),
    [
        (absorbed, True),
        (lambda: absorbed(neutral=(), attention="eager"), False),
        (lambda: absorbed("auto", attention="eager"), True),
        (packed, True),
    ],
    ids=["absorbed", "a norm, eager", "auto, eager", "packed"],
)
def test_attention_decodes_on_the_gpu(make: Callable[[], Any], masked: bool) -> None:
    with fake_gpu():
        assert decoded(OnGpu(make()), masked) == {"cuda"}
        assert devices(dense_mask(torch.ones(2, 5, dtype=torch.long).to(GPU), torch.ones(2, 8, 16).to(GPU))) == {"cuda"}


@pytest.mark.parametrize(("latent", "form"), [(True, "int4"), (False, "fp8")])
def test_encoded_caches_are_decoded_on_the_gpu(latent: bool, form: str) -> None:
    model = absorbed(qk_nope_head_dim=8, v_head_dim=8) if latent else packed()
    with fake_gpu():
        moved = OnGpu(model)
        moved.cache.layers = [EncodedLayer(FORMATS[form], latent)]
        moved.cache.layer_class_to_replicate = None
        assert devices([moved(tokens(2, size)) for size in (4, 1, 1)]) == {"cuda"}
        assert moved.cache.get_seq_length() == 6
