"""Sharpened queries: their rotary part moves away from its mean, and nothing else changes."""

from dataclasses import fields, replace

import pytest
import torch
from records import factored, factored_behind_norms, inputs, measured, measured_behind, random, record

from attention.record import FactoredAttention, Record
from convert.methods.sharpened import sharpened

LOST = 0.02
CASES: dict[str, FactoredAttention] = {
    "latent": factored(),
    "latent of queries": replace(factored(width=20), q_down=(torch.arange(20) / 4).diag()),
    "behind norms": factored_behind_norms(),
}


def rotary_queries(a: Record, read: torch.Tensor) -> torch.Tensor:
    """`[H, T, P]` before RoPE and biases, of what queries read."""
    assert isinstance(a, FactoredAttention)
    return read @ a.q_rope.double().mT


@pytest.mark.parametrize(("lost", "gain"), [(LOST, 0.04), (0.5, 0.06)])
@pytest.mark.parametrize("case", CASES)
def test_rotary_queries_move_away_from_their_mean(case: str, lost: float, gain: float) -> None:
    a, x = CASES[case], inputs(20, tokens=300) + 30 * random(20, seed=3)  # far off centre, so that they predict a constant
    seen, read = measured(x), x.flatten(0, 1).double()
    if a.projections:
        seen, read = measured_behind(a.projections, x), a.projections(x)[0].transpose(0, 1).flatten(1, 2).double()
    elif a.q_down is not None:
        read = read @ a.q_down.double().T
    found = sharpened(a, lost, seen)
    before, after = rotary_queries(a, read), rotary_queries(found, read)
    around, change = before - before.mean(1, keepdim=True), after - before
    assert float((around * change).sum() / around.square().sum()) == pytest.approx(gain, rel=0.05)
    assert float(change.norm()) <= 1.1 * gain * float(around.norm())  # the mean is a dozen times as large
    changed = {field.name for field in fields(a) if getattr(found, field.name) is not getattr(a, field.name)}
    assert changed == {"q_rope"}


@pytest.mark.parametrize(("a", "lost"), [(record(), LOST), (factored(), 1e-7)], ids=["heads", "lossless"])
def test_queries_of_heads_and_of_what_is_lossless_stay(a: Record, lost: float) -> None:
    assert sharpened(a, lost, measured(inputs(20))) is a
