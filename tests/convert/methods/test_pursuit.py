"""The pursuit of atoms, against dense sums over distances and heads, re-derived here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from entries import Dense, keys_of
from hypothesis import given, settings
from hypothesis import strategies as st
from records import record

from attention.rope import Pairing, Rotary
from convert.methods.pursuit import Pursuit, pairs_by_pursuit, pursue


def settle(pursuit: Pursuit) -> torch.Tensor:
    """Power iteration until it stands."""
    for _ in range(60):
        explained = pursuit.explained()
    return explained


@settings(max_examples=6, deadline=None)
@given(
    groups=st.integers(1, 3), share=st.integers(1, 2), pairs=st.integers(1, 5), nope=st.integers(0, 2),
    pairing=st.sampled_from(["half", "interleaved"]), biased=st.booleans(), factor=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 50), text=st.booleans(), halves=st.booleans(),
)  # fmt: skip
def test_an_atom_explains_the_top_eigenvalue_and_what_is_missing_falls_by_it(
    groups: int,
    share: int,
    pairs: int,
    nope: int,
    pairing: Pairing,
    biased: bool,
    factor: float,
    seed: int,
    text: bool,
    halves: bool,
) -> None:
    keys = keys_of(record(groups, share, pairs, nope, 20, pairing, biased, factor, seed), text)
    pursuit = Pursuit.of(keys, candidates=[i / 2 for i in range(2 * pairs - 1)] if halves else None)
    dense = Dense(keys, text, halves)
    assert pursuit.total == pytest.approx(dense.whole, rel=1e-9)
    for step in range(3):
        found, expected = settle(pursuit), dense.explained()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-7)
        b, before = int(found.argmax()), dense.energy()
        if before < 1e-6 * dense.whole:
            break
        pursuit.take(b)
        _, coefficients, combination = pursuit.atoms[-1]
        dense.take(b, coefficients, combination @ keys.z.flatten(0, 1))
        assert (before - dense.energy()) / dense.whole == pytest.approx(float(found[b]), rel=2e-2, abs=1e-7), step


def test_atoms_between_frequencies_leave_the_mean_of_what_they_do_not_explain() -> None:
    keys = keys_of(record(2, 2, 4, 0, 20))
    dense, atoms = Dense(keys, halves=True), pursue(keys, (0.5, 2, 2.5))
    rope = torch.stack([dense.waves[:, :, None] * keys.z[h // 2] for h in range(4)])  # [H, T, L, E + 1]
    for m, candidate in enumerate((1, 4, 5)):
        before = dense.energy()
        dense.take(candidate, atoms.coefficients[..., m], atoms.keys[m])
        assert dense.energy() < before
        wave = dense.offered[:, candidate, None, None]
        rope = rope - wave * (atoms.coefficients[:, None, :, m, None] * atoms.keys[m])
    expected = torch.einsum("ht,htle->hle", dense.mass.to(rope.dtype), rope)
    rest = torch.complex(*atoms.rest(keys).unflatten(1, (2, 4)).unbind(1))
    torch.testing.assert_close(rest, expected, rtol=1e-9, atol=1e-9)


def test_a_few_iterations_are_enough_to_choose_by() -> None:
    for seed in range(2):
        keys = keys_of(record(3, 2, 6, 0, 30, seed=seed))
        found, expected = Pursuit.of(keys).explained(), Dense(keys).explained()
        assert (found <= expected * (1 + 1e-9)).all(), "from below"
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)
        rough = Pursuit.of(keys, torch.complex64).explained()
        torch.testing.assert_close(rough, expected, rtol=0.05, atol=0)


def test_one_atom_serves_frequencies_that_are_next_to_equal() -> None:
    a = record(groups=2, share=1, pairs=4, width=30, biased=False)
    assert a.rotary is not None
    close = Rotary(torch.tensor([1.0, 1.0 + 1e-7, 1.0 - 1e-7, 0.2], dtype=torch.float64))
    factors = torch.tensor([[1.0, 2.0j, -1.0, 0.0], [0.5, 1.0, 3.0, 0.0]])
    shared = a.rotary.to_complex(a.k)[0][:1, :1] * factors[..., None]
    keys = keys_of(dataclasses.replace(a, k=close.from_complex(shared), rotary=close))
    pursuit = Pursuit.of(keys)
    (chosen,) = pairs_by_pursuit([pursuit], 1)
    assert chosen in (0, 1, 2)
    pursuit.explained()
    pursuit.take(chosen)
    assert float(settle(pursuit).max()) < 1e-6, "nothing is left"


def test_all_layers_share_their_frequencies() -> None:
    layers = [keys_of(record(2, 2, 5, 0, 30, seed=seed)) for seed in range(3)]
    together = pairs_by_pursuit([Pursuit.of(keys) for keys in layers], 4)
    sums = torch.stack([Dense(keys).explained() for keys in layers]).sum(0)
    assert together[0] == int(sums.argmax())
    assert len(together) == 4


def test_keys_of_zeros_have_atoms_of_zeros() -> None:
    a = record(2, 2, 3, 0, 20, biased=False)
    keys = keys_of(dataclasses.replace(a, k=torch.zeros_like(a.k)))
    pursuit = Pursuit.of(keys)
    assert not pursuit.explained().any()
    assert len(pairs_by_pursuit([pursuit], 2)) == 2
    atoms = pursue(keys, (0, 1))
    assert torch.isfinite(torch.view_as_real(atoms.coefficients)).all()
    assert not atoms.keys.abs().any()


def test_a_frequency_that_was_taken_can_be_taken_again() -> None:
    """What the pursuit goes on from is just what was subtracted there; the next key must be found all the same."""
    for seed in range(20):
        pursuit = Pursuit.of(keys_of(record(2, 1, 1 + seed % 3, 0, 20, biased=False, seed=seed)))
        pursuit.take(int(pursuit.explained().argmax()))
        going_on = pursuit.explained()
        anew = Pursuit(pursuit.gram, pursuit.near, pursuit.among, pursuit.importance, pursuit.total, pursuit.atoms).explained()
        torch.testing.assert_close(going_on, anew, rtol=0.1, atol=1e-6)
