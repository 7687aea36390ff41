"""How far back heads look: against sums over queries, and tails whose law is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from records import record

from attention.scoring import Scoring
from convert.methods.distances import mass, mass_of
from convert.methods.statistics import Statistics

FALLING = torch.stack([1 / (1 + torch.arange(64, dtype=torch.float64)) ** power for power in (0.5, 1.0, 2.0)])


@pytest.mark.parametrize("context", [1, 10, 64])
def test_a_query_shares_its_attention_among_the_tokens_that_it_sees(context: int) -> None:
    expected = torch.zeros(3, context, dtype=torch.float64)
    for t in range(context):
        seen = FALLING[:, : t + 1]
        expected[:, : t + 1] += seen / seen.sum(1, keepdim=True) / context
    torch.testing.assert_close(mass(FALLING, context), expected, rtol=1e-12, atol=0)


def test_a_tail_goes_on_by_its_own_power_law() -> None:
    far = torch.arange(1, 4097, dtype=torch.float64)
    for power in (0.5, 1.0, 2.0):
        measured, expected = mass(far[None, :512] ** -power, 4096), mass(far[None] ** -power, 4096)
        torch.testing.assert_close(measured.sum(1), torch.ones(1).double())
        torch.testing.assert_close(measured[:, 400:], expected[:, 400:], rtol=0.1, atol=0)


def test_a_tail_that_rises_goes_on_level() -> None:
    near = torch.linspace(0.1, 1, 64, dtype=torch.float64)[None]
    far = mass(near, 256)
    shares = far[0, 48:] / (1 / torch.arange(1, 257, dtype=torch.float64)).flip(0).cumsum(0).flip(0)[48:]
    assert (far[0, 48:] > 0).all()
    assert shares[-1] / shares[0] == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize("length", [1, 2, 15])
def test_short_blocks_have_no_tail(length: int) -> None:
    found = mass(FALLING[:, :length], 40)
    assert not found[:, length:].any()
    torch.testing.assert_close(found.sum(1), torch.ones(3).double())


def test_heads_that_see_the_first_token_alone_look_nowhere_else() -> None:
    found = mass(torch.zeros(1, 20, dtype=torch.float64), 50)[0]
    torch.testing.assert_close(found, torch.eye(50, dtype=torch.float64)[0], rtol=0, atol=1e-300)


def test_without_text_attention_falls_off_as_one_over_the_distance() -> None:
    a, known = record(2, 1), Statistics.assumed(20)
    assert mass_of(replace(a, scoring=Scoring(window=16)), known).shape == (2, 16), "no farther than a window"
    found = mass_of(a, known)
    assert found.shape == (2, 2048)
    torch.testing.assert_close(found[1, 0] / found[1, 9], torch.tensor(10.0).double())
