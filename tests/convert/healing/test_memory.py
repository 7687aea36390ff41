"""The memory that a healing is said to take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convert import gqa, heal, mla
from convert.healing import memory
from convert.healing.heads import hidden_states
from convert.healing.memory import expected
from convert.healing.plan import HealPlan

TEXT = ["some text " * 400]


@pytest.fixture
def plan(checkpoint: Callable[..., Path], tmp_path: Path) -> HealPlan:
    mla(checkpoint("llama"), tmp_path / "mla", kv_lora_rank=24, qk_rope_head_dim=8, method="svd")
    sizes = {"tokens": 1280, "context": 16, "batch_tokens": 64}
    return heal(tmp_path / "mla", tmp_path / "out", text=TEXT, device="cpu", lr=1e-3, dry_run=True, **sizes).plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, plan: HealPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in a forward pass that computes nothing, and in a real one."""
    from attention.padding import pad_values
    from eval.inputs.loading import load

    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
        return tensor

    with load(plan.converted, device="cpu") as model:
        pad_values(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("self_attn" in name or "input_layernorm" in name)
        rounded = torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16)
        with rounded, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden_states(model, torch.zeros(4, 16, dtype=torch.long))
        own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        real = sum(storage.nbytes() for address, storage in kept.items() if address not in own)
    monkeypatch.setattr(memory, "computes_in", lambda plan: dtype)
    assert expected(plan)["activations"] == pytest.approx(real, rel=0.05)


def test_weights_count_by_what_is_kept_of_them(plan: HealPlan) -> None:
    from convert.checkpoint.loading import empty_model

    model = empty_model(plan.converted.config)
    named = dict(model.named_parameters())
    attention = sum(p.numel() for name, p in named.items() if "self_attn" in name or "input_layernorm" in name)
    found = expected(plan)
    assert found["student"] == 4 * sum(p.numel() for p in named.values())
    assert found["training"] == 20 * attention
    assert expected(plan, 2)["training"] == 10 * attention
    thin = expected(replace(plan, options=replace(plan.options, lora_rank=2)))["training"]
    assert 0 < thin < found["training"] / 4
    assert found["teacher"] == 4 * sum(p.numel() for p in empty_model(plan.teacher.config).parameters())


def test_layers_that_are_computed_again_take_less(plan: HealPlan) -> None:
    less = replace(plan, options=replace(plan.options, checkpointing=True))
    assert expected(less)["activations"] < 0.5 * expected(plan)["activations"]


def test_experts_are_counted_without_numbers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """torch's grouped products refuse float32 tensors that have shapes alone."""
    gqa(checkpoint("qwen3_moe"), tmp_path / "gqa", groups=2, method="mean", no_text=True)
    done = heal(tmp_path / "gqa", tmp_path / "out", text=TEXT, device="cpu", dry_run=True, tokens=1280, context=16)
    assert expected(done.plan)["activations"] > 0
