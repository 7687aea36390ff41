"""How far back heads look: against sums over queries."""

from dataclasses import replace

import torch
from records import block_of, inputs, measured, record

from attention.forward import Block
from attention.record import Scoring
from convert.methods.blocks import Blocks
from convert.methods.distances import attention_by_distance, mass_of
from convert.methods.statistics import Statistics


def test_heads_look_where_the_sample_shows() -> None:
    a, x, positions = record(2, 2), inputs(20, tokens=30), (*range(20), *range(320, 330))
    known = replace(measured(x), sample=Blocks(x, torch.tensor([[*range(30)], positions])))
    found, paid = mass_of(a, known), attention_by_distance(a, [block_of(x[0]), Block(x[1], positions)])
    expected = paid / paid.sum(1, keepdim=True)
    torch.testing.assert_close(found[:, :30], expected[:, :30], rtol=1e-9, atol=0)
    torch.testing.assert_close(found[:, 250:].sum(1), expected[:, 250:].sum(1), rtol=1e-9, atol=0)
    assert found[:, 301:].unique(dim=1).shape[1] < 5, "far distances within a sixteenth are alike"
    torch.testing.assert_close(found.sum(1), torch.ones(4).double())


def test_heads_that_see_the_first_token_alone_look_nowhere_else() -> None:
    a = record(2, 2)
    found = mass_of(a, measured(inputs(20, tokens=1)))
    torch.testing.assert_close(found, torch.ones(4, 1).double())


def test_without_text_attention_falls_off_as_one_over_the_distance() -> None:
    a, known = record(2, 1), Statistics.assumed(20)
    assert mass_of(replace(a, scoring=Scoring(window=16)), known).shape == (2, 16), "no farther than a window"
    found = mass_of(a, known)
    assert found.shape == (2, 2048)
    torch.testing.assert_close(found[1, 0] / found[1, 9], torch.tensor(10.0).double())
