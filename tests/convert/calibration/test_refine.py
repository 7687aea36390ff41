"""Gradient descent on one layer: it never does worse on blocks that it did not see, and huge tokens do not hide the others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from streams import model_of, records_of, stream_of
from tiny_mla import tokens

from attention.spec import AttentionSpec
from convert.calibration.refine import _relative, _shuffled, refined
from convert.families import FAMILIES


@pytest.mark.parametrize(("rate", "taken"), [(0.03, True), (100.0, False), (float("nan"), False)])
def test_steps_that_lead_away_are_not_taken(rate: float, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.calibration.refine._RATES", (rate, rate))
    model = model_of()
    stream, family = stream_of(model, tmp_path / "spool", tokens(7, 12)), FAMILIES["llama"]
    stream.embed()
    stream.advance(0)
    record = records_of(model)(0)
    spoilt, spec = replace(record, q=1.3 * record.q), AttentionSpec.from_config(model.config)
    found, errors = refined(spoilt, lambda record: family.join(record, spec, 0), stream, stream, 0, 10, 0)
    assert (found is not spoilt) == taken
    assert (0 < errors["layer_error_refined"] < errors["layer_error"]) == taken
    assert taken or errors["layer_error_refined"] == errors["layer_error"] > 0


def test_every_token_counts_alike() -> None:
    """As behind a norm: a token of a thousand times the size has no more to say than another one."""
    inputs, added, error = (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    large = torch.ones(2, 5, 1)
    large[:, 0] = 1000
    expected = inputs + added
    found = _relative(expected + error, inputs, expected)
    torch.testing.assert_close(_relative((expected + error) * large, inputs * large, expected * large), found)
    wrong = error.clone()
    wrong[:, 1:] *= 10
    assert _relative((expected + wrong) * large, inputs * large, expected * large) > 10 * found


def test_a_layer_that_adds_nothing_is_compared_with_its_input() -> None:
    inputs, nothing = torch.ones(1, 3, 4), torch.zeros(1, 3, 4)
    assert float(_relative(inputs, inputs, inputs)) == 0
    assert torch.isfinite(_relative(2 * inputs, inputs, inputs))
    assert torch.isfinite(_relative(nothing, nothing, nothing))


def test_blocks_come_in_random_order_again_and_again() -> None:
    order = _shuffled([3, 5, 9], 7, 1)
    assert len(order) == 7
    assert sorted(order[:3]) == sorted(order[3:6]) == [3, 5, 9]
    assert order == _shuffled([3, 5, 9], 7, 1)
    assert len({tuple(_shuffled([3, 5, 9], 7, seed)) for seed in range(9)}) > 1
