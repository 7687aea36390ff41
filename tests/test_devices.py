"""Attention, methods, surveys and fits on fake CUDA tensors, of which no operation takes one on a CPU.

Weights are on the GPU, and statistics come from the disk.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import GPU, REFUSED, devices, fake_gpu, to_gpu
from records import blocks_of, factored, inputs, measured, record, run
from safetensors.torch import load_file
from streams import WINDOWS, model_of, stream_of
from tiny import tiny_config, tiny_model
from tiny_mla import mla_model, tokens
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import DynamicCache

from attention import absorb, pack
from attention.cache import EncodedLayer
from attention.formats import FORMATS
from attention.forward import attention_output, output_error
from attention.latent import dense_mask
from attention.record import Attention, Record
from attention.rope import Rotary
from convert import gqa, mla
from convert.calibration.outputs import OutputFit
from convert.calibration.refit import refitted
from convert.calibration.survey import Moments, survey
from convert.methods import GROUPED, LATENT, load_grouped, load_latent
from convert.methods.blocks import Blocks
from convert.methods.distances import attention_by_distance
from convert.methods.latent import Allocation
from convert.methods.statistics import Statistics
from eval.inputs.sealed import Shelf

FEW = inputs(20, tokens=6, blocks=1)
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
LONG = Rotary(FREQUENCIES, "half", 1.2, FREQUENCIES / 4, 1)
SEEN: dict[str, Record] = {
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


MIXED: dict[str, Callable[..., Any]] = {
    "add": lambda gpu, cpu: gpu + cpu,
    "products": lambda gpu, cpu: torch.linalg.multi_dot([gpu, cpu, gpu]),
    "einsum": lambda gpu, cpu: torch.einsum("ij,jk->ik", gpu, cpu),
    "cat": lambda gpu, cpu: torch.cat((gpu, cpu)),
    "gather": lambda gpu, cpu: gpu.gather(0, cpu.long()),
    "index": lambda gpu, cpu: cpu[gpu[0].long()],
    "index assigned": lambda gpu, cpu: gpu.__setitem__([0, 1], cpu[:2]),
    "solve": lambda gpu, cpu: torch.linalg.solve(gpu, cpu),
    "attention": lambda gpu, cpu: torch.nn.functional.scaled_dot_product_attention(gpu[None], cpu[None], gpu[None]),
    "compared": lambda gpu, cpu: torch.equal(gpu, cpu),
    "generator": lambda gpu, cpu: torch.randn(3, device=gpu.device, generator=torch.Generator()),
}


@pytest.mark.parametrize("operation", MIXED.values(), ids=MIXED)
def test_a_meeting_of_devices_is_refused(operation: Callable[..., Any]) -> None:
    with fake_gpu(), pytest.raises(RuntimeError, match=REFUSED):
        operation(torch.ones(4, 4).to(GPU), torch.ones(4, 4))


def test_values_are_made_up_on_the_gpu_alone() -> None:
    with fake_gpu([True, False]):
        gpu, cpu = torch.ones(3).to(GPU), torch.tensor([0.25, 0.5])
        assert (float(cpu[0]), cpu.tolist(), bool((cpu > 0).all())) == (0.25, [0.25, 0.5], True)
        assert (bool((gpu > 0).all()), bool(gpu.any()), int(gpu.argmax())) == (True, False, 1)
        first, second = float(gpu[1]), float(gpu.sum())
        assert 0 < second < first
        assert torch.equal(gpu.double().cpu(), torch.zeros(3).double())


@pytest.mark.parametrize("a", SEEN.values(), ids=SEEN)
def test_a_record_on_the_gpu_computes_there(a: Record) -> None:
    with fake_gpu():
        on_gpu, x = to_gpu(a), FEW.to(GPU)
        blocks = blocks_of(x)
        assert devices(on_gpu) == {"cuda"}
        assert devices([attention_output(on_gpu, blocks), run(on_gpu, x)]) == {"cuda"}
        assert isinstance(output_error(on_gpu, to_gpu(record()), blocks), float)
        if isinstance(on_gpu, Attention):
            assert devices(attention_by_distance(on_gpu, blocks)) == {"cuda"}


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


X = inputs(20, tokens=6)
SURVEYED, ASSUMED = measured(X), Statistics.assumed(20)  # on the CPU, as they come from the disk and from gains
MHA, GQA = record(4, 1, biased=False), record(2, 2, nope=2, pairing="interleaved", factor=1.2)
RECORDS: dict[str, Attention] = {
    "GQA, biased, partial": GQA,
    "no RoPE": record(4, 1, pairs=0, nope=6),
    "norm": record(4, 1, norm="all"),
}
COMPONENTS = Allocation(5, (0, 0, 1))
ALLOCATIONS = [Allocation(5, (0, 2), freqfold=3), Allocation(5, (0, 0, 1, 1, 2, 2))]  # folded, and of every pair


@pytest.mark.parametrize(
    ("method", "kind"), [*(("aligned", kind) for kind in RECORDS), *((method, "norm") for method in GROUPED)], ids=str
)
def test_heads_are_merged_on_the_gpu(method: str, kind: str) -> None:
    with fake_gpu(False):
        for statistics in (SURVEYED, ASSUMED) if kind == "GQA, biased, partial" else (SURVEYED,):
            merged = load_grouped(method).merge(to_gpu(RECORDS[kind]), 1 if kind == "no RoPE" else 2, statistics)
            assert devices(merged) == {"cuda"}


@pytest.mark.parametrize("statistics", [SURVEYED, ASSUMED], ids=["surveyed", "assumed"])
@pytest.mark.parametrize("method", LATENT)
def test_frequencies_are_chosen_and_latents_made_on_the_gpu(method: str, statistics: Statistics) -> None:
    chosen, rotary = load_latent(method), MHA.rotary
    with fake_gpu():
        gqa = to_gpu(GQA)
        for a in (gqa, to_gpu(RECORDS["no RoPE"])):
            assert devices(chosen.factor(a, replace(COMPONENTS, rotary=rotary), statistics)) == {"cuda"}
        found = [chosen.measure(gqa, statistics)] if chosen.measure else []
        for count in (1, 4):
            assert len(chosen.allocate(found, count, Allocation(5, (), rotary=GQA.rotary))) == count
    with fake_gpu(False):
        for allocation in ALLOCATIONS if method == "weighted" and statistics is SURVEYED else []:
            assert devices(chosen.factor(to_gpu(GQA), replace(allocation, rotary=rotary), statistics)) == {"cuda"}


@pytest.fixture
def without_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes cannot be outputs of layers by their class, as the stream makes them."""
    monkeypatch.setattr(torch.Tensor, "as_subclass", lambda self, cls: self)


@pytest.mark.usefixtures("without_classes")
def test_a_survey_runs_on_the_gpu_and_leaves_its_statistics_on_the_disk(tmp_path: Path) -> None:
    model, seen = model_of("gemma2", num_hidden_layers=2, **WINDOWS), list[torch.Tensor]()
    with fake_gpu():
        stream = stream_of(model, tmp_path / "spool", tokens(2, 6), device=GPU)
        attention = to_gpu(record(2, 2, width=stream.width))
        found = survey(stream, Shelf(tmp_path, "source"), lambda layer: attention, range(2))(1)
        assert devices(found) == {"cpu"}
        assert devices(found.to(GPU)) == devices(found.to(GPU).shrunk()) == {"cuda"}
        stream.embed()
        stream.advance(0, seen.append, attended=lambda batch, inputs, added: seen.extend((inputs, added)))
        assert devices(seen) == {"cuda"}
        moments = Moments(0, stream, attention)
        moments.see(seen[0])
        assert devices(moments.statistics()) == {"cuda"}
        with pytest.raises(RuntimeError, match=REFUSED):
            Moments(0, stream, attention).see(torch.ones(1, 6, stream.width))


@pytest.mark.parametrize(
    ("a", "b"),
    [(record(2, 1, nope=2), record(1, 2, nope=2, seed=1)), (record(2, 1), factored(2))],
    ids=["GQA, partial", "latent"],
)
def test_records_are_refitted_on_the_gpu(a: Attention, b: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    # A round of the refit begins with what the one before has made, which is seen to lie on the GPU.
    monkeypatch.setattr("convert.calibration.refit._ROUNDS", 1)
    # Fake tensors have no values to choose a share of the change by: the last one tried is taken.
    monkeypatch.setattr("convert.calibration.refit._ROUNDING", float("nan"))

    def last(first: Any, *others: Any, key: Any = None) -> Any:
        return list(first)[-1] if key else min(first, *others)

    monkeypatch.setattr("convert.calibration.refit.min", last, raising=False)
    with fake_gpu():
        before, after = to_gpu(a), to_gpu(b)
        fitted = refitted(before, after, Blocks.whole(X.to(GPU)), SURVEYED.attended)
        assert fitted is not after
        assert devices(fitted) == {"cuda"}
        fit = OutputFit(after)
        for _ in range(2):
            fit.see(torch.ones(2, 6, after.o[0].numel()).to(GPU), X[:2].to(GPU))
        assert devices(fit.record()) == {"cuda"}


@pytest.fixture
def without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are taken along zeros: fakes have no gradients."""
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: None)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, without_classes: None, without_gradients: None) -> None:
    """A machine that has one. What is saved of fakes, which have no values, is zeros, and loaded as such."""
    save, load = torch.save, torch.load

    def saved(value: Any, file: Any) -> None:
        value = to_gpu(value, torch.device("cpu"))
        with unset_fake_temporarily():
            save(value, file)

    def loaded(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return load(*arguments, **options)

    monkeypatch.setattr(torch, "save", saved)
    monkeypatch.setattr(torch, "load", loaded)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 10**10, 8 * 10**10))


CONVERSIONS: dict[str, tuple[str, tuple[int, int], Callable[..., Any], dict[str, Any]]] = {
    "gqa": ("qwen2", (2, 4), gqa, {"groups": 2, "refit": False}),
    "mla": ("llama", (1, 2), mla, {"kv_lora_rank": 16, "qk_rope_head_dim": 4}),
}


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.filterwarnings("ignore:.*calibration text are few")
@pytest.mark.parametrize(("model_type", "size", "command", "options"), CONVERSIONS.values())
def test_a_whole_conversion_never_mixes_devices(
    model_type: str,
    size: tuple[int, int],
    command: Callable[..., Any],
    options: dict[str, Any],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    layers, heads = size
    source = checkpoint(model_type, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads)
    text = {"text": ["some words to look at"], "calibration_context": 8, "calibration_tokens": 8}
    with fake_gpu():
        command(source, tmp_path / "out", device="cuda", **text, **options)
    assert "model.layers.0.self_attn.o_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")
