"""`random`: the control that keeps nothing."""

from __future__ import annotations

import dataclasses

import torch
from merging import merge, record


def test_random_keeps_nothing_and_is_seeded() -> None:
    a = record(groups=4, norm="head")
    once, again, other = (merge("random", a, 2, seed) for seed in (3, 3, 4))
    assert torch.equal(once.k, again.k)
    assert torch.equal(once.v, again.v)
    assert not torch.equal(once.k, other.k)
    assert not torch.equal(once.k, once.v)
    assert 0.01 < once.k.std() < 0.03
    assert once.k_bias.abs().sum() == once.v_bias.abs().sum() == 0
    assert torch.equal(once.k_norm.gain, torch.ones(2, 6))
    assert torch.equal(once.k_norm.bias, torch.zeros(2, 6))
    assert once.q is a.q


def test_random_gains_are_one_where_gain_minus_one_is_stored() -> None:
    a = record(groups=4, norm="head")
    a = dataclasses.replace(a, k_norm=dataclasses.replace(a.k_norm, gain_offset=1.0))
    assert merge("random", a, 2).k_norm.gain.abs().sum() == 0
