"""The memory that a healing is said to take, and how many tokens `--time` allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.errors import Refusal
from convert import Healing, gqa, heal
from convert.checkpoint.loading import empty_model
from convert.healing import costs
from convert.healing.costs import expected
from convert.healing.loss import hidden_states
from convert.healing.plan import HealPlan
from convert.healing.texts import TrainingTexts
from convert.output.destination import Output

PACES = 0.01, 0.002  # seconds of a token in a step and in a measurement


@pytest.fixture
def plan(results: Callable[[str], Path], text: Path, sizes: dict[str, Any], tmp_path: Path) -> HealPlan:
    return heal(results("mla"), tmp_path / "out", text=text, dry_run=True, **sizes).plan


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
    monkeypatch.setattr(costs, "computes_in", lambda plan: dtype)
    assert expected(plan)["activations"] == pytest.approx(real, rel=0.05)


def test_weights_count_by_what_is_kept_of_them(plan: HealPlan) -> None:
    model = empty_model(plan.converted.config)
    named = dict(model.named_parameters())
    attention = sum(p.numel() for name, p in named.items() if "self_attn" in name or "input_layernorm" in name)
    found = expected(plan)
    assert found["student"] == 4 * sum(p.numel() for p in named.values())
    assert found["training"] == 20 * attention
    assert expected(plan, 2)["training"] == 10 * attention
    thin = expected(replace(plan, options=replace(plan.options, train="lora", lora_rank=2)))["training"]
    assert 0 < thin < found["training"] / 4
    assert found["teacher"] == 4 * sum(p.numel() for p in empty_model(plan.teacher.config).parameters())


def test_layers_that_are_computed_again_take_less(plan: HealPlan) -> None:
    less = replace(plan, options=replace(plan.options, checkpointing=True))
    assert expected(less)["activations"] < 0.5 * expected(plan)["activations"]


def test_experts_are_counted_without_numbers(shelf: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    """torch's grouped products refuse float32 tensors that have shapes alone."""
    gqa(shelf("qwen3_moe"), tmp_path / "gqa", groups=2, method="mean", no_text=True)
    done = heal(tmp_path / "gqa", tmp_path / "out", text=text, device="cpu", dry_run=True, tokens=1280, context=16)
    assert expected(done.plan)["activations"] > 0
    assert f"memory: about {sum(expected(done.plan).values()) / 1e9:.2f} GB" in str(done)


def test_too_little_memory_is_said(plan: HealPlan, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    costs.say_memory(plan)
    assert not warned()
    monkeypatch.setattr(costs, "free_memory", lambda device: 10**6)
    costs.say_memory(plan)
    assert "cpu has 0.0 GB free, and healing takes about 0.1 GB" in warned()[0]


def test_a_time_is_as_many_tokens_as_it_takes(
    converted: Path, text: Path, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_paces", lambda plan, module: PACES)
    given = {"text": text, "dry_run": True, "context": 32, "batch_tokens": 128, "device": "cpu", "lr": 1e-3}
    for time, seconds in (("1min", 60), (30, 30), ("0.5h", 1800)):
        plan = heal(converted, tmp_path / "out", time=time, **given).plan
        assert costs._seconds(plan, TrainingTexts.read(plan), *PACES) == pytest.approx(seconds, rel=0.1)
    for changes, says in (
        ({"time": 1}, r"a healing of 128 tokens takes .* seconds here, longer than --time allows"),
        ({"time": "1h", "tokens": 100}, "contradict each other"),
        ({"time": "1x"}, r"'1x' is not a time"),
    ):
        with pytest.raises(Refusal, match=says):
            heal(converted, tmp_path / "out", **(given | changes))
    monkeypatch.setattr(costs, "launched_count", lambda: 2)
    with pytest.raises(Refusal, match="2 processes would each time steps"):
        heal(converted, tmp_path / "two", time=30, **given)


def test_what_was_begun_keeps_its_tokens(healed: Healing, tmp_path: Path) -> None:
    """However fast its steps are now; one that is finished and replaced is timed anew."""
    plan = replace(healed.plan, asked=10**9, output=replace(healed.plan.output, resume=True))
    resumed = costs.within(plan, 1.0, lambda *_: None)
    assert (resumed.tokens, resumed.batch, resumed.steps) == (640, 4, 10)
    assert costs._begun(replace(plan.output, overwrite=True)) is None
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "inputs.json").write_text('{"tokens": 1280, "batch_tokens": 64}')
    assert costs._begun(Output(tmp_path / "out", resume=True, overwrite=True)) == (1280, 64)


def test_steps_are_timed_and_leave_nothing_behind(converted: Path, text: Path, tmp_path: Path) -> None:
    told: list[Any] = []
    sizes = {"context": 32, "batch_tokens": 128, "device": "cpu", "lr": 1e-3, "train": "all"}
    given = {"time": 20, "dry_run": True, "progress": lambda *progress: told.append(progress)}
    assert heal(converted, tmp_path / "out", text=text, **given, **sizes).plan.tokens > 1000
    assert told[-1] == ("time steps", 9, 9, "step")
    assert not list(tmp_path.glob("out*"))
