"""What conversion.json says of how far layers moved, by weights alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from latents import SMALL, WAYS, method_options
from written import damage, ok

Make = Callable[..., Path]
Convert = Callable[..., Any]
Logits = Callable[..., torch.Tensor]


def test_unequal_heads_do_lose(checkpoint: Make, convert: Convert, logits: Logits, tmp_path: Path) -> None:
    source = checkpoint()
    for method, errors in (("mean", ("k_error", "v_error")), ("aligned", ("score_error", "output_error"))):
        ok(convert("gqa", source, tmp_path / method, "--groups", 2, "--method", method))
        assert (logits(tmp_path / method) - logits(source)).abs().max() > 0.1
        layers = json.loads((tmp_path / method / "conversion.json").read_text())["layers"]
        assert [entry["layer"] for entry in layers] == [0, 1, 2]
        assert all(0.1 < entry[name] < 1 for entry in layers for name in errors)


@pytest.mark.parametrize("method", WAYS)
def test_less_than_full_size_loses(
    method: str, checkpoint: Make, convert: Convert, logits: Logits, words: Path, tmp_path: Path
) -> None:
    source = checkpoint()
    distance = []
    for rank, rope in ((8, 8), (24, 24), (33, 32)):
        out = tmp_path / f"{rank}"
        ok(convert("mla", source, out, "--kv-lora-rank", rank, "--qk-rope-head-dim", rope, *method_options(method, words)))
        distance.append(float((logits(out) - logits(source)).abs().mean()))
    assert distance[0] > distance[1] > distance[2]
    assert distance[1] > 1e-2
    assert distance[2] < 1e-4
    layers = json.loads((tmp_path / "8" / "conversion.json").read_text())["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2]
    most = 3 if method == "weighted with text" else 1  # least squares do not heed errors that inputs do not show
    assert all(0.1 < layer["output_error"] < most and 0.01 < layer["score_error"] < 2 for layer in layers)
    whole = json.loads((tmp_path / "33" / "conversion.json").read_text())["layers"]
    assert all(layer["output_error"] < 1e-9 and layer["score_error"] < 1e-6 for layer in whole)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_large_and_small_weights_have_errors_that_are_numbers(
    scale: float, checkpoint: Make, convert: Convert, tmp_path: Path
) -> None:
    def rescale(tensors: dict[str, torch.Tensor]) -> None:
        for name, factor in (("q", 1 / scale), ("k", scale), ("v", scale), ("o", 1 / scale)):
            tensors[f"model.layers.1.self_attn.{name}_proj.weight"].mul_(factor)

    source = checkpoint()
    ok(convert("mla", source, tmp_path / "plain", *SMALL))
    ok(convert("mla", damage(source, rescale), tmp_path / "out", *SMALL))
    plain, found = (
        json.loads((tmp_path / name / "conversion.json").read_text(), parse_constant=pytest.fail)["layers"][1]
        for name in ("plain", "out")
    )
    assert found["output_error"] == pytest.approx(plain["output_error"], rel=0.3)
    assert found["score_error"] == pytest.approx(plain["score_error"], rel=0.3)
