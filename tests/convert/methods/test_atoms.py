"""Components and what they leave, against dense sums over distances and heads, re-derived here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from entries import Dense, keys_of
from records import inputs, measured, record

from attention.forward import attention_by_distance
from attention.rope import Rotary
from convert.methods.atoms import Components, RopeKeys
from convert.methods.distances import mass
from convert.methods.statistics import Statistics


@pytest.mark.parametrize("text", [False, True])
def test_all_components_together_are_the_keys(text: bool) -> None:
    keys = keys_of(record(3, 2, 4, 1, 30), text)
    every = tuple(pair for pair in range(4) for _ in range(3))
    atoms = Components.of(keys).atoms(keys, every)
    whole = torch.einsum("hlm,me->hle", atoms.coefficients, atoms.keys)
    torch.testing.assert_close(whole, keys.z.repeat_interleave(2, 0), rtol=1e-9, atol=1e-9)
    assert not atoms.rest(keys).any(), "nothing but rounding is left"


def test_what_does_not_turn_is_the_mean_over_the_distances() -> None:
    keys = keys_of(record(2, 2, 3, 0, 30))
    atoms = Components.of(keys).atoms(keys, (1,))
    dense = Dense(keys)
    coefficient = atoms.coefficients[..., 0]
    rope = torch.einsum("tl,le->tle", dense.waves, torch.ones(3, 31, dtype=torch.complex128))
    rest = torch.complex(*atoms.rest(keys).unflatten(1, (2, 3)).unbind(1))  # half-split, as the record's
    for h in range(4):
        left = rope * keys.z[h // 2] - dense.waves[:, 1, None, None] * coefficient[h][:, None] * atoms.keys[0]
        expected = (dense.mass[h][:, None, None] * left).sum(0)
        torch.testing.assert_close(rest[h], expected, rtol=1e-9, atol=1e-9)


def test_what_a_component_loses_is_what_not_turning_costs() -> None:
    """MHA, one head: λ² E|z|² (1 − |φ|²) at each frequency."""
    keys = keys_of(record(1, 1, 4, 0, 30))
    energy = torch.einsum("gle,gle->l", keys.moved, keys.z.conj()).real
    expected = keys.importance[0].square() * energy * (1 - keys.phase[0].abs().square())
    torch.testing.assert_close(Components.of(keys).lost[:, 0], expected, rtol=1e-9, atol=0)


def test_distances_are_measured_on_text_and_assumed_without() -> None:
    a = record(2, 2, 3, 0, 20)
    known = measured(inputs(20))
    assert known.sample is not None
    near = attention_by_distance(a, known.sample.blocks)
    assert torch.equal(RopeKeys.of(a, known).mass, mass(near, near.shape[1]))
    farther = RopeKeys.of(a, dataclasses.replace(known, context=100)).mass
    assert torch.equal(farther, mass(near, 100))
    falling = RopeKeys.of(a, Statistics.assumed(20)).mass
    torch.testing.assert_close(falling.sum(1), torch.ones(4).double())
    torch.testing.assert_close(falling[0, 0] / falling[0, 9], torch.tensor(10.0).double())


def test_phases_turn_as_the_sequence_does() -> None:
    """LongRoPE: beyond its limit all of a sequence rotates by the long list, in the attention and in the phases."""
    short, long = (torch.tensor(values, dtype=torch.float64) for values in ([1.0, 0.3, 0.1], [0.5, 0.1, 0.01]))
    a = dataclasses.replace(record(2, 2, 3, 0, 20), rotary=Rotary(short, long_frequencies=long, long_beyond=20))
    for tokens, expected in ((20, short), (21, long)):
        waves = RopeKeys.of(a, measured(inputs(20, tokens=tokens))).waves
        torch.testing.assert_close(waves[1], torch.exp(-1j * expected))
