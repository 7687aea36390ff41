"""Every class's decoder and head, apart, give the logits that they give together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_model

from convert.families import FAMILIES
from convert.healing.heads import hidden_states, logits_of


def ids_for(model: Any) -> torch.Tensor:
    return torch.randint(4, model.config.get_text_config().vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_parts_are_the_whole(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type)).eval()
    ids = ids_for(model)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = logits_of(model, hidden_states(model, ids).flatten(0, 1))
    torch.testing.assert_close(parts, whole.flatten(0, 1).float(), rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model.get_decoder())


def test_a_result_in_a_class_of_our_own(
    checkpoint: Callable[..., Path], convert: Callable[..., object], tmp_path: Path
) -> None:
    from attention import load

    assert convert("mla", checkpoint("gpt2"), tmp_path / "out", "--kv-lora-rank", 24, "--qk-rope-head-dim", 0).exit_code == 0
    model = load(tmp_path / "out", dtype=torch.float32).eval()
    ids = ids_for(model)
    with torch.no_grad():
        parts = logits_of(model, hidden_states(model, ids).flatten(0, 1))
        torch.testing.assert_close(parts, model(ids, use_cache=False).logits.flatten(0, 1), rtol=1e-5, atol=1e-5)


def test_gradients_reach_hidden_states_through_the_class_head() -> None:
    model = tiny_model(tiny_config("gemma2")).eval()
    hidden = hidden_states(model, ids_for(model)).flatten(0, 1).detach().requires_grad_(True)
    logits_of(model, hidden).square().sum().backward()
    slopes, hidden.grad = hidden.grad, None
    cap = model.config.final_logit_softcapping
    (cap * torch.tanh(model.lm_head(hidden) / cap)).square().sum().backward()
    torch.testing.assert_close(slopes, hidden.grad)
