"""Atoms and the pursuit of them, against dense sums over distances and heads, re-derived here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import inputs, measured, record

from attention.forward import attention_mass
from attention.record import Attention
from attention.rope import Pairing, Rotary
from convert.methods.atoms import Components, RopeKeys
from convert.methods.pursuit import Pursuit, pairs_by_pursuit, pursue
from convert.methods.statistics import Statistics


def known_of(a: Attention, text: bool) -> Statistics:
    return measured(inputs(a.q.shape[2])) if text else Statistics.assumed(a.q.shape[2])


def keys_of(a: Attention, text: bool = True) -> RopeKeys:
    """With distances up to a few tens of tokens: sums over them are spelled out here."""
    keys = RopeKeys.of(a, known_of(a, text))
    mass = keys.mass[:, :40]
    return dataclasses.replace(keys, mass=mass / mass.sum(-1, keepdim=True))


class Dense:
    """Entries (head, frequency) as functions of distance and input, spelled out: `[H, T, L, E + 1]`."""

    def __init__(self, keys: RopeKeys, text: bool = True) -> None:
        a = keys.attention
        assert a.rotary is not None
        length, share = keys.mass.shape[1], len(keys.w) // len(keys.z)
        distance = torch.arange(length, dtype=torch.float64)
        self.waves = torch.exp(-1j * distance[:, None] * a.rotary.frequencies)  # e^{iθ (s − t)}, [T, L]
        self.mass, self.second = keys.mass, known_of(a, text).with_constant.to(torch.complex128)
        self.weight = keys.weight
        self.missing = torch.stack([self.waves[:, :, None] * keys.z[h // share] for h in range(len(keys.w))])
        self.missing = self.missing - self._mean(self.missing)
        self.whole = self.energy()

    def _mean(self, functions: torch.Tensor) -> torch.Tensor:
        """Under each head's own distances: the best unrotated key."""
        return torch.einsum("ht,htle->hle", self.mass.to(functions.dtype), functions)[:, None]

    def energy(self) -> float:
        """Σ λ² E|what is missing|²."""
        moved = torch.einsum("htle,ef,htlf->htl", self.missing, self.second, self.missing.conj()).real
        return float((self.mass[:, :, None] * self.weight[:, None].square() * moved).sum())

    def projected(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """λ ⟨missing, e_b⟩ / ‖e_b‖ of each entry `[H L, E + 1]`, and ‖e_b‖ `[H]`."""
        wave = self.waves[:, b]
        own = (self.mass * wave.abs().square()).sum(1) - (self.mass.to(wave.dtype) @ wave).abs().square()
        product = torch.einsum("ht,t,htle->hle", self.mass.to(wave.dtype), wave.conj(), self.missing)
        rows = product * (self.weight / own.sqrt()[:, None])[..., None]
        return rows.flatten(0, 1), own.sqrt()

    def explained(self) -> torch.Tensor:
        """`[L]`: the top eigenvalue of each frequency's matrix."""
        rows = [self.projected(b)[0] for b in range(self.waves.shape[1])]
        return torch.stack([torch.linalg.eigvalsh(w @ self.second @ w.mH)[-1] for w in rows]) / self.whole

    def take(self, b: int, shares: torch.Tensor, key: torch.Tensor) -> None:
        """Subtract shares `[H, L]` of an atom `key [E + 1]`, and what an unrotated key can do of it."""
        atom = (self.waves[:, b, None] * shares[:, None])[..., None] * key
        self.missing = self.missing - (atom - self._mean(atom))


def settle(pursuit: Pursuit) -> torch.Tensor:
    """Power iteration until it stands."""
    for _ in range(60):
        explained = pursuit.explained()
    return explained


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 3), share=st.integers(1, 2), pairs=st.integers(1, 5), nope=st.integers(0, 2),
    pairing=st.sampled_from(["half", "interleaved"]), biased=st.booleans(), factor=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 50), text=st.booleans(),
)  # fmt: skip
def test_an_atom_explains_the_top_eigenvalue_and_what_is_missing_falls_by_it(
    groups: int, share: int, pairs: int, nope: int, pairing: Pairing, biased: bool, factor: float, seed: int, text: bool
) -> None:
    keys = keys_of(record(groups, share, pairs, nope, 20, pairing, biased, factor, seed), text)
    pursuit, dense = Pursuit.of(keys), Dense(keys, text)
    assert pursuit.total == pytest.approx(dense.whole, rel=1e-9)
    for step in range(3):
        found, expected = settle(pursuit), dense.explained()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-7)
        b, before = int(found.argmax()), dense.energy()
        if before < 1e-6 * dense.whole:
            break
        pursuit.take(b)
        _, shares, combination = pursuit.atoms[-1]
        dense.take(b, shares, combination @ keys.z.flatten(0, 1))
        assert (before - dense.energy()) / dense.whole == pytest.approx(float(found[b]), rel=2e-2, abs=1e-7), step


def test_a_few_iterations_are_enough_to_choose_by() -> None:
    for seed in range(5):
        keys = keys_of(record(3, 2, 6, 0, 30, seed=seed))
        found, expected = Pursuit.of(keys).explained(), Dense(keys).explained()
        assert (found <= expected * (1 + 1e-9)).all(), "from below"
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)
        rough = Pursuit.of(keys, torch.complex64).explained()
        torch.testing.assert_close(rough, expected, rtol=0.05, atol=0)


def test_two_keys_at_one_frequency_are_both_found() -> None:
    a = record(groups=2, share=1, pairs=4, width=30, biased=False)
    k = a.k.clone().unflatten(1, (2, 4))
    k[:, :, [0, 1, 3]] = 0
    keys = keys_of(dataclasses.replace(a, k=k.flatten(1, 2)))
    pursuit = Pursuit.of(keys)
    assert pairs_by_pursuit([pursuit], 2) == (2, 2)
    for pair in (2, 2):
        pursuit.explained()
        pursuit.take(pair)
    settle(pursuit)
    assert float(pursuit.explained().max()) < 1e-6, "nothing is left"
    atoms = pursue(keys, (2, 2))
    found = atoms.shares.mT.unsqueeze(-1).mul(atoms.keys[None, :, None]).sum(1)  # [H, L, E + 1]
    torch.testing.assert_close(found[:, 2], keys.z[:, 2], rtol=1e-4, atol=1e-4)


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


def test_the_same_keys_give_the_same_atoms() -> None:
    keys = keys_of(record(2, 2, 5, 0, 30))
    once, again = (pairs_by_pursuit([Pursuit.of(keys, torch.complex64)], 4) for _ in range(2))
    assert once == again
    first, second = (pursue(keys, once) for _ in range(2))
    assert torch.equal(first.shares, second.shares)
    assert torch.equal(first.keys, second.keys)


def test_keys_of_zeros_have_atoms_of_zeros() -> None:
    a = record(2, 2, 3, 0, 20, biased=False)
    keys = keys_of(dataclasses.replace(a, k=torch.zeros_like(a.k)))
    pursuit = Pursuit.of(keys)
    assert not pursuit.explained().any()
    assert len(pairs_by_pursuit([pursuit], 2)) == 2
    atoms = pursue(keys, (0, 1))
    assert torch.isfinite(torch.view_as_real(atoms.shares)).all()
    assert not atoms.keys.abs().any()


# ---- components ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [False, True])
def test_all_components_together_are_the_keys(text: bool) -> None:
    keys = keys_of(record(3, 2, 4, 1, 30), text)
    every = tuple(pair for pair in range(4) for _ in range(3))
    atoms = Components.of(keys).atoms(keys, every)
    whole = torch.einsum("hlm,me->hle", atoms.shares, atoms.keys)
    torch.testing.assert_close(whole, keys.z.repeat_interleave(2, 0), rtol=1e-9, atol=1e-9)
    assert not atoms.rest(keys).any(), "nothing but rounding is left"


def test_what_does_not_turn_is_the_mean_over_the_distances() -> None:
    keys = keys_of(record(2, 2, 3, 0, 30))
    atoms = Components.of(keys).atoms(keys, (1,))
    dense = Dense(keys)
    share = atoms.shares[..., 0]
    rope = torch.einsum("tl,le->tle", dense.waves, torch.ones(3, 31, dtype=torch.complex128))
    rest = torch.complex(*atoms.rest(keys).unflatten(1, (2, 3)).unbind(1))  # half-split, as the record's
    for h in range(4):
        left = rope * keys.z[h // 2] - dense.waves[:, 1, None, None] * share[h][:, None] * atoms.keys[0]
        expected = (dense.mass[h][:, None, None] * left).sum(0)
        torch.testing.assert_close(rest[h], expected, rtol=1e-9, atol=1e-9)


def test_what_a_component_loses_is_what_not_turning_costs() -> None:
    """MHA, one head: λ² E|z|² (1 − |φ|²) at each frequency."""
    keys = keys_of(record(1, 1, 4, 0, 30))
    energy = torch.einsum("gle,gle->l", keys.moved, keys.z.conj()).real
    expected = keys.weight[0].square() * energy * (1 - keys.phase[0].abs().square())
    torch.testing.assert_close(Components.of(keys).lost[:, 0], expected, rtol=1e-9, atol=0)


def test_distances_are_measured_on_text_and_assumed_without() -> None:
    a = record(2, 2, 3, 0, 20)
    known = measured(inputs(20))
    assert known.sample is not None
    assert torch.equal(RopeKeys.of(a, known).mass, attention_mass(a, known.sample))
    falling = RopeKeys.of(a, Statistics.assumed(20)).mass
    torch.testing.assert_close(falling.sum(1), torch.ones(4).double())
    torch.testing.assert_close(falling[0, 0] / falling[0, 9], torch.tensor(10.0).double())


def test_phases_turn_as_the_sequence_does() -> None:
    """LongRoPE: beyond its limit all of a sequence turns by the long list, in the attention and in the phases."""
    short, long = (torch.tensor(values, dtype=torch.float64) for values in ([1.0, 0.3, 0.1], [0.5, 0.1, 0.01]))
    a = dataclasses.replace(record(2, 2, 3, 0, 20), rotary=Rotary(short, long_frequencies=long, long_beyond=20))
    for tokens, expected in ((20, short), (21, long)):
        waves = RopeKeys.of(a, measured(inputs(20, tokens=tokens))).waves
        torch.testing.assert_close(waves[1], torch.exp(-1j * expected))


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_a_frequency_that_was_taken_can_be_taken_again(pairs: int) -> None:
    """What the pursuit goes on from is just what was subtracted there; the next key must be found all the same."""
    for seed in range(40):
        pursuit = Pursuit.of(keys_of(record(2, 1, pairs, 0, 20, biased=False, seed=seed)))
        pursuit.take(int(pursuit.explained().argmax()))
        going_on = pursuit.explained()
        anew = Pursuit(pursuit.gram, pursuit.near, pursuit.weight, pursuit.total, pursuit.atoms).explained()
        torch.testing.assert_close(going_on, anew, rtol=0.1, atol=1e-6)
