"""LoRA beside the weights of a student: it begins as the student, and its products are written into the matrices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attention.errors import Refusal
from convert import heal, mla, mqa
from convert.healing.student import trained
from convert.healing.trainable import Adapted
from convert.planning.base import readable
from eval.inputs.source import Source

SIZES: dict[str, Any] = {"tokens": 1280, "context": 16, "batch_tokens": 64, "lr": 1e-3, "device": "cpu", "train": "lora"}
IDS = torch.arange(4, 60).view(2, 28)
Make = Callable[..., Path]


def converted(kind: str, checkpoint: Make, where: Path) -> Path:
    source, _, target = kind.partition(" ")
    if target == "mla":
        mla(checkpoint(source), where, kv_lora_rank=24, method="svd", **({} if source == "gpt2" else {"qk_rope_head_dim": 8}))
    else:
        mqa(checkpoint(kind), where, method="mean")
    return where


def loaded(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=True).requires_grad_(False)


def adapted(path: Path, rank: int = 4) -> tuple[Any, Adapted, list[str]]:
    model = loaded(path)
    names = trained(model, readable(Source.parse(str(path), True)), 3, "lora")
    return model, Adapted(model, names, rank, 0), names


@pytest.mark.parametrize("kind", ["llama", "llama mla", "qwen2 mla", "gpt2", "gpt2 mla", "gpt_neox", "qwen3 mla"])
def test_its_products_are_written_into_the_matrices(kind: str, checkpoint: Make, tmp_path: Path) -> None:
    path = converted(kind, checkpoint, tmp_path / "converted")
    plain, (model, what, names) = loaded(path), adapted(path)
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


def test_every_matrix_of_attention_has_a_gradient(checkpoint: Make, tmp_path: Path) -> None:
    model, _, names = adapted(converted("llama mla", checkpoint, tmp_path / "converted"))
    model(IDS, use_cache=False).logits.square().sum().backward()
    of_b = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert len(of_b) == sum(
        parameter.ndim == 2 for name, parameter in loaded(tmp_path / "converted").named_parameters() if name in names
    )
    assert all(grad is not None and bool(grad.any()) for grad in of_b.values())


def test_it_comes_closer_and_keeps_constants(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    path = converted("llama mla", checkpoint, tmp_path / "mla")
    before = load_file(path / "model.safetensors")
    for name in (name for name in before if name.endswith("o_proj.weight")):
        before[name] *= 1.3  # something to heal
    save_file(before, path / "model.safetensors")
    done = heal(path, tmp_path / "out", text=text, **SIZES)
    assert done.provenance["healing"]["after"]["kl"] < 0.9 * done.provenance["healing"]["before"]["kl"]
    assert done.provenance["recipe"]["heal"]["lora_rank"] == 16
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert set(after) == set(before)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed
    assert all("self_attn" in name or "input_layernorm" in name for name in changed)
    for name, gain in ((name, weight) for name, weight in before.items() if name.endswith("kv_a_layernorm.weight")):
        down, bias = (name.replace("kv_a_layernorm.weight", f"kv_a_proj_with_mqa.{part}") for part in ("weight", "bias"))
        assert torch.equal(after[name], gain)
        assert torch.equal(after[bias][: len(gain)], before[bias][: len(gain)])
        assert not after[down][: len(gain)][gain == 0].any()
        assert down in changed


def test_padding_of_a_latent_stays(checkpoint: Make, text: Path, tmp_path: Path) -> None:
    mla(checkpoint("llama"), tmp_path / "mla", kv_lora_rank=80, qk_rope_head_dim=8, pad_rank=True, method="svd")
    before = load_file(tmp_path / "mla" / "model.safetensors")
    for name in (name for name in before if name.endswith("o_proj.weight")):
        before[name] *= 1.3  # something to heal
    save_file(before, tmp_path / "mla" / "model.safetensors")
    heal(tmp_path / "mla", tmp_path / "out", text=text, **(SIZES | {"lr": 1e-3}))
    after = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    unread = ~before[name].any(0)
    assert unread.any()
    assert not after[name][:, unread].any()
    assert not torch.equal(after[name], before[name])


def test_what_it_needs_is_named(checkpoint: Make, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = converted("llama", checkpoint, tmp_path / "mqa")
    with pytest.raises(Refusal, match="--lora-rank 4 is for --train lora, not all"):
        heal(path, tmp_path / "out", text=text, dry_run=True, lora_rank=4, **(SIZES | {"train": "all"}))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Refusal, match="needs peft") as error:
        heal(path, tmp_path / "out", text=text, dry_run=True, **SIZES)
    assert "kvfold[lora]" in str(error.value.hint)
