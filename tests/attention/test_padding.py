"""Padding values changes how fast stock latent attention runs, not what it computes, and touches no other model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import random_model, tiny_config
from tiny_mla import error, logits, mla_model, tokens

from attention.padding import PADDED, pad_values


@pytest.mark.parametrize("model_type", ["deepseek_v3", "minicpm3"])
def test_padding_changes_no_result(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = mla_model(model_type), tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = logits(model, ids), logits(model, ids, mask=mask)[mask.bool()]
    assert pad_values(model) is model
    assert model.config._attn_implementation == PADDED
    widths: set[tuple[int, ...]] = set()
    stock = torch.nn.functional.scaled_dot_product_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        widths.add((query.shape[-1], key.shape[-1], value.shape[-1]))
        return stock(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found = logits(model, ids), logits(model, ids, mask=mask)[mask.bool()]
    assert [len(set(width)) for width in widths] == [1], "values are as wide as keys"
    assert max(error(*pair) for pair in zip(found, expected, strict=True)) < 1e-6


@pytest.mark.parametrize(
    "model",
    [lambda: random_model(tiny_config("llama")), lambda: mla_model(attention="eager")],
    ids=["grouped", "eager"],
)
def test_other_models_stay_as_they_are(model: Any) -> None:
    made = model()
    before = made.config._attn_implementation
    assert pad_values(made).config._attn_implementation == before != PADDED
