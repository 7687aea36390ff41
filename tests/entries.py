"""Entries (query head, frequency) of rotary keys as functions of distance and input, spelled out: for tests of atoms."""

from __future__ import annotations

import dataclasses

import torch
from records import inputs, measured

from attention.record import Attention
from convert.methods.atoms import RopeKeys
from convert.methods.statistics import Statistics


def known_of(a: Attention, text: bool) -> Statistics:
    return measured(inputs(a.q.shape[2])) if text else Statistics.assumed(a.q.shape[2])


def keys_of(a: Attention, text: bool = True) -> RopeKeys:
    """With distances up to a few tens of tokens: sums over them are spelled out here."""
    keys = RopeKeys.of(a, known_of(a, text))
    mass = keys.mass[:, :40]
    return dataclasses.replace(keys, mass=mass / mass.sum(-1, keepdim=True))


class Dense:
    """Entries (head, frequency) as functions of distance and input, spelled out: `[H, T, L, E + 1]`.

    Atoms have the entries' own frequencies, or halves between them, too.
    """

    def __init__(self, keys: RopeKeys, text: bool = True, halves: bool = False) -> None:
        a = keys.attention
        assert a.rotary is not None
        length, share = keys.mass.shape[1], len(keys.w) // len(keys.z)
        distance = torch.arange(length, dtype=torch.float64)
        self.waves = torch.exp(-1j * distance[:, None] * a.rotary.frequencies)  # e^{iθ (s − t)}, [T, L]
        own = a.rotary.frequencies
        between = torch.stack((own, (own * torch.cat((own[1:], own[-1:]))).sqrt()), 1).flatten()[: 2 * len(own) - 1]
        self.offered = torch.exp(-1j * distance[:, None] * between) if halves else self.waves
        self.mass, self.second = keys.mass, known_of(a, text).with_constant.to(torch.complex128)
        self.importance = keys.importance
        self.missing = torch.stack([self.waves[:, :, None] * keys.z[h // share] for h in range(len(keys.w))])
        self.missing = self.missing - self._mean(self.missing)
        self.whole = self.energy()

    def _mean(self, functions: torch.Tensor) -> torch.Tensor:
        """Under each head's own distances: the best nope key."""
        return torch.einsum("ht,htle->hle", self.mass.to(functions.dtype), functions)[:, None]

    def energy(self) -> float:
        """Σ λ² E|what is missing|²."""
        moved = torch.einsum("htle,ef,htlf->htl", self.missing, self.second, self.missing.conj()).real
        return float((self.mass[:, :, None] * self.importance[:, None].square() * moved).sum())

    def projected(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """λ ⟨missing, e_b⟩ / ‖e_b‖ of each entry `[H L, E + 1]`, and ‖e_b‖ `[H]`."""
        wave = self.offered[:, b]
        own = (self.mass * wave.abs().square()).sum(1) - (self.mass.to(wave.dtype) @ wave).abs().square()
        product = torch.einsum("ht,t,htle->hle", self.mass.to(wave.dtype), wave.conj(), self.missing)
        rows = product * (self.importance / own.sqrt()[:, None])[..., None]
        return rows.flatten(0, 1), own.sqrt()

    def explained(self) -> torch.Tensor:
        """`[B]`: the top eigenvalue of each offered frequency's matrix."""
        rows = [self.projected(b)[0] for b in range(self.offered.shape[1])]
        return torch.stack([torch.linalg.eigvalsh(w @ self.second @ w.mH)[-1] for w in rows]) / self.whole

    def take(self, b: int, shares: torch.Tensor, key: torch.Tensor) -> None:
        """Subtract shares `[H, L]` of an atom `key [E + 1]`, and what a nope key can do of it."""
        atom = (self.offered[:, b, None] * shares[:, None])[..., None] * key
        self.missing = self.missing - (atom - self._mean(atom))
