"""Gradient descent on one layer: it never does worse on blocks that it did not see, and huge tokens do not hide the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from written import ok, weights

from convert.calibration.refine import _energies, _shuffled

Make = Callable[..., Path]
Convert = Callable[..., Any]


@pytest.mark.parametrize("rate", [100.0, float("nan")])
def test_steps_that_lead_away_are_not_taken(
    rate: float, checkpoint: Make, convert: Convert, on: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint()
    ok(convert("mqa", source, tmp_path / "plain", *on))
    monkeypatch.setattr("convert.calibration.refine._RATES", (rate, rate))
    ok(convert("mqa", source, tmp_path / "out", *on, "--refine", 3))
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)
    for note in json.loads((tmp_path / "out" / "conversion.json").read_text())["layers"]:
        assert note["layer_error"] == note["layer_error_refined"] > 0


def error(missing: torch.Tensor, added: torch.Tensor, inputs: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    found = _energies(missing, added, inputs, expected)
    return found[0] / found[1]


def test_every_token_counts_alike() -> None:
    """As behind a norm: a token of a thousand times the size has no more to say than another one."""
    inputs, added, missing = (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    large = torch.ones(2, 5, 1)
    large[:, 0] = 1000
    found = error(missing, added, inputs, inputs + added)
    torch.testing.assert_close(error(missing * large, added * large, inputs * large, (inputs + added) * large), found)
    wrong = missing.clone()
    wrong[:, 1:] *= 10
    assert error(wrong * large, added * large, inputs * large, (inputs + added) * large) > 10 * found


def test_a_layer_that_adds_nothing_is_compared_with_its_input() -> None:
    inputs, nothing = torch.ones(1, 3, 4), torch.zeros(1, 3, 4)
    assert float(error(nothing, nothing, inputs, inputs)) == 0
    assert torch.isfinite(error(inputs, nothing, inputs, inputs))
    assert torch.isfinite(error(nothing, nothing, nothing, nothing))


def test_blocks_come_in_random_order_again_and_again() -> None:
    order = _shuffled([3, 5, 9], 7, 1)
    assert len(order) == 7
    assert sorted(order[:3]) == sorted(order[3:6]) == [3, 5, 9]
    assert order == _shuffled([3, 5, 9], 7, 1)
    assert len({tuple(_shuffled([3, 5, 9], 7, seed)) for seed in range(9)}) > 1
