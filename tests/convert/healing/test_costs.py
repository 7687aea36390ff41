"""The memory that a healing is said to take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convert import heal
from convert.checkpoint.loading import empty_model
from convert.healing import costs
from convert.healing.costs import held
from convert.healing.plan import HealPlan


@pytest.fixture
def plan(results: Callable[[str], Path], text: Path, sizes: dict[str, Any], tmp_path: Path) -> HealPlan:
    return heal(results("mla"), tmp_path / "out", text=text, dry_run=True, **sizes).plan


def test_weights_count_by_what_is_kept_of_them(plan: HealPlan) -> None:
    model = empty_model(plan.converted.config)
    named = dict(model.named_parameters())
    attention = sum(p.numel() for name, p in named.items() if "self_attn" in name or "input_layernorm" in name)
    found = held(plan)
    assert found["student"] == 4 * sum(p.numel() for p in named.values())
    assert found["training"] == 20 * attention
    assert held(plan, 2)["training"] == 10 * attention
    thin = held(replace(plan, options=replace(plan.options, train="lora", lora_rank=2)))["training"]
    assert 0 < thin < found["training"] / 4
    assert found["teacher"] == 4 * sum(p.numel() for p in empty_model(plan.teacher.config).parameters())


def test_too_little_memory_is_said(plan: HealPlan, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    costs.say_memory(plan)
    assert not warned()
    monkeypatch.setattr(costs, "free_memory", lambda device: 10**3)
    costs.say_memory(plan)
    assert "cpu has 0.0 GB free, and healing takes 0.0 GB without activations" in warned()[0]
