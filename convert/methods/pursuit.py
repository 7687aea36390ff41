"""Rotary atoms for fewer rotary pairs than frequencies: an atom may serve every head and every frequency near its own.

"Near" is measured under each head's own distribution p_h of distances: ⟨e_a, e_b⟩_h = E_{p_h} e^{i (θ_a − θ_b)(s − t)}. The
nope key is the atom of frequency 0 and is projected out first, so that an atom gets credit only for what a nope key
cannot do. Greedy matching pursuit (Mallat and Zhang, 1993): take the frequency b and the key y that explain the most weighted
energy over all entries (head, frequency), subtract them, repeat. All layers share the frequencies; each has its own keys.

No step has a dimension of width E: keys are combinations of the layer's own z, and their Gram matrix suffices. The best
keys are found by power iteration for all frequencies at once, starting from the result for the last atom.

Cost per layer and atom: a few products of the Gram matrix `[G L, G L]` with `[G L, B]`, for B frequencies to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from convert.methods.atoms import Atoms, RopeKeys

_FIRST, _FURTHER = 40, 8  # power iterations, from scratch and from the last atom's result


@dataclass
class Pursuit:
    """The remainder of the entries (query head h, frequency l) of one layer, for each of B candidate frequencies b.

    Attributes:
        gram: `[G L, G L]`, z Σ z^H.
        near: `[H, L, B]`, ⟨e_l, e_b⟩_h minus the part that a nope key can do.
        among: `[H, B, B]`, the same of two candidates.
        importance: `[H, L]`, λ.
        total: The weighted energy at the start.
        atoms: For each atom so far, its candidate, its coefficients `[H, L]` and its key as a combination `[G L]` of z.
    """

    gram: torch.Tensor
    near: torch.Tensor
    among: torch.Tensor
    importance: torch.Tensor
    total: float
    atoms: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _found: torch.Tensor | None = None

    @classmethod
    def of(cls, keys: RopeKeys, dtype: torch.dtype = torch.complex128, candidates: Sequence[float] | None = None) -> Pursuit:
        """A pursuit at its start. The candidates are numbers of the source's frequencies (`Rotary.select`), or all of these."""
        waves = keys.waves
        offered = waves if candidates is None else keys.waves_of(candidates)
        gram = keys.moved.flatten(0, 1) @ keys.z.flatten(0, 1).mH
        energy = keys.per_query_head(gram.diagonal().real.unflatten(0, keys.z.shape[:2]))
        total = float((keys.importance.square() * energy * (1 - keys.phase.abs().square())).sum())
        real = torch.float64 if dtype == torch.complex128 else torch.float32
        near, among = (_near(keys, part, offered).to(dtype) for part in (waves, offered))
        return cls(gram.to(dtype), near, among, keys.importance.to(real), total)

    def explained(self) -> torch.Tensor:
        """`[B]`, the share of the total energy that the best key at each candidate explains."""
        candidates = self.near.shape[-1]
        if self._found is None:
            found, steps = torch.stack([self._start(b) for b in range(candidates)]), _FIRST
        else:
            found, steps = self._found, _FURTHER
        values = self.importance.new_zeros(candidates)
        for _ in range(steps):
            found = self._apply(found)
            values = found.abs().square().sum((1, 2)).sqrt()
            found = found / values.clamp_min(torch.finfo(values.dtype).tiny)[:, None, None]
        self._found = found
        return values.double() / (self.total or 1.0)

    def take(self, b: int) -> None:
        """Add the best atom of candidate b, as `explained` found it."""
        assert self._found is not None
        u = self._found[b]
        key = self._gathered(self._found)[b].conj()
        self.atoms.append((b, u / self.importance / self._norm(b), key))
        self._found[b] = self._start(b)  # the last result at b is explained now

    def _start(self, b: int) -> torch.Tensor:
        """The start of the power iteration at candidate b."""
        generator = torch.Generator().manual_seed(b)
        return torch.randn(self.importance.shape, dtype=self.near.dtype, generator=generator).to(self.near.device)

    def _norm(self, b: int | slice) -> torch.Tensor:
        """`[H, B or 1]`, the root of ⟨e_b, e_b⟩_h."""
        own = self.among.diagonal(dim1=1, dim2=2).real
        own = own.clamp_min(1e-9)
        return own[:, b].sqrt()[:, None] if isinstance(b, int) else own.sqrt()

    def _scale(self) -> torch.Tensor:
        """`[B, H, L]`: λ over the norm of each candidate."""
        return self.importance[None] / self._norm(slice(None)).T[:, :, None]

    def _apply(self, u: torch.Tensor) -> torch.Tensor:
        """The map from z to the remainder, times its adjoint, for every candidate: `[B, H, L]` → `[B, H, L]`."""
        groups = len(self.gram) // self.importance.shape[1]
        moved = self._gathered(u) @ self.gram.T  # [B, G L]
        keys = moved.unflatten(1, (groups, -1)).repeat_interleave(self.importance.shape[0] // groups, 1)
        out = self.near.permute(2, 0, 1) * keys
        for a, coefficients, key in self.atoms:
            out = out - self.among[:, a].T[:, :, None] * coefficients * (moved @ key)[:, None, None]
        return out * self._scale()

    def _gathered(self, u: torch.Tensor) -> torch.Tensor:
        """The adjoint of the map from z to the remainder, `[B, H, L]` → `[B, G L]`."""
        u, groups = u * self._scale(), len(self.gram) // self.importance.shape[1]
        out = (self.near.permute(2, 0, 1).conj() * u).unflatten(1, (groups, -1)).sum(2).flatten(1)
        for a, coefficients, key in self.atoms:
            out = out - (self.among[:, a].T[:, :, None] * coefficients).conj().mul(u).sum((1, 2))[:, None] * key.conj()
        return out


def _near(keys: RopeKeys, waves: torch.Tensor, offered: torch.Tensor) -> torch.Tensor:
    """`[H, m, B]`, inner products of waves `[N, m]` and `[N, B]` behind the projection to what varies with the distance."""
    products = torch.stack([(waves * row[:, None]).T @ offered.conj() for row in keys.mass.to(waves.dtype)])
    return products - keys.averaged(waves)[:, :, None] * keys.averaged(offered)[:, None].conj()


def pairs_by_pursuit(layers: Sequence[Pursuit], count: int) -> tuple[int, ...]:
    """The frequencies of `count` atoms, those that explain the most over all layers first."""
    layers = [replace(layer, atoms=[], _found=None) for layer in layers]  # a measured layer may serve several sizes
    chosen = []
    for _ in range(count):
        explained = [layer.explained() for layer in layers]
        best = int(torch.stack(explained).sum(0).argmax())
        for layer in layers:
            layer.take(best)
        chosen.append(best)
    return tuple(chosen)


def pursue(keys: RopeKeys, pairs: tuple[float, ...]) -> Atoms:
    """The atoms of one layer at the given frequencies."""
    candidates = sorted(set(pairs))
    pursuit = Pursuit.of(keys, candidates=candidates)
    for pair in pairs:
        pursuit.explained()
        pursuit.take(candidates.index(pair))
    coefficients = torch.stack([coefficients for _, coefficients, _ in pursuit.atoms], -1)
    combinations = torch.stack([key for _, _, key in pursuit.atoms])
    return Atoms(pairs, coefficients, combinations @ keys.z.flatten(0, 1))
