"""`pca`: the published formula, recomputed; where folding frequencies is exact, and where real rotations are not enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from records import PAIRINGS, every_pair, factor, full_rank, inputs, loss, record, turned_copies, unturning

from attention.rope import Pairing, Rotary
from convert.methods.latent import Allocation


def test_a_real_rotation_cannot_undo_turned_copies() -> None:
    a, kept = turned_copies(record(groups=4, width=30)), (0, 1, 2)
    assert loss(a, factor("pca", a, Allocation(full_rank(a, kept), kept))) > 1e-2


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("fold", [2, 4])
def test_folding_is_exact_where_the_folded_frequencies_are_equal(fold: int, pairing: Pairing) -> None:
    a = record(groups=2, pairs=4, nope=1, width=40, pairing=pairing)
    different, kept = factor("pca", a, Allocation(40 - 4, every_pair(a), fold)), every_pair(a)
    equal = (1.3 * 0.4 ** torch.arange(4 // fold, dtype=torch.float64)).repeat_interleave(fold)
    same = dataclasses.replace(a, rotary=Rotary(equal, pairing))
    assert loss(same, factor("pca", same, Allocation(full_rank(same, kept), kept, fold))) < 1e-5
    assert loss(a, different) > 1e-2


@pytest.mark.parametrize("fold", [1, 2])
def test_pca_is_the_published_formula(fold: int) -> None:
    """Recomputed in numpy from the formula: the kept key per band, ρ, and the joint subspace."""
    groups, pairs, width, rank = 3, 4, 30, 9
    a, x = record(groups, 2, pairs, 0, width), inputs(30)
    kept = tuple(pair for pair in range(0, pairs, fold) for _ in range(fold))
    found = factor("pca", a, Allocation(rank, kept, fold), x)

    k, v = (tensor.double().numpy() for tensor in (a.k, a.v))
    bias, rows = a.k_bias.double().numpy(), x.double().flatten(0, 1).numpy()
    second = rows.T @ rows / len(rows)
    rotated, rest, back = [], [], []
    for start in range(0, pairs, fold):
        members = [(g, pair) for g in range(groups) for pair in range(start, start + fold)]
        real = np.stack([k[g, pair] for g, pair in members])
        imaginary = np.stack([k[g, pairs + pair] for g, pair in members])
        real_bias = np.array([bias[g, pair] for g, pair in members])
        imaginary_bias = np.array([bias[g, pairs + pair] for g, pair in members])
        activations = [rows @ real.T + real_bias, rows @ imaginary.T + imaginary_bias]
        u = np.linalg.eigh(sum(z.T @ z for z in activations))[1][:, ::-1]
        for j in range(len(members)):
            if j < fold:
                rotated += [u[:, j] @ real, u[:, j] @ imaginary]
                continue
            for part, half in ((real, 0), (imaginary, pairs)):
                rest.append(u[:, j] @ part)
                column = np.zeros((groups, 2 * pairs))
                for (g, pair), weight in zip(members, u[:, j], strict=True):
                    column[g, half + pair] = weight
                back.append(column.ravel())

    ours = found.k_rope.double().numpy()
    assert ours.shape == np.shape(rotated)
    for i in range(0, len(rotated), 2):  # an eigenvector may have either sign
        sign = np.sign(ours[i] @ rotated[i])
        np.testing.assert_allclose(ours[i : i + 2], sign * np.stack(rotated[i : i + 2]), rtol=1e-4, atol=1e-5)

    def norms(weights: Any) -> Any:
        return np.sqrt(np.mean((rows @ np.reshape(weights, (-1, width)).T) ** 2, 0)).mean()

    rho = norms(rest) / norms(v)
    joint = np.concatenate((np.stack(rest) / rho, v.reshape(-1, width)))
    leading = np.linalg.eigh(joint @ second @ joint.T)[1][:, ::-1][:, :rank]
    projected = leading @ leading.T @ joint
    keys = rho * np.stack(back, 1) @ projected[: len(rest)]
    np.testing.assert_allclose(unturning(found, 2)[: groups * 2 * pairs], keys, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(unturning(found, 2)[groups * 2 * pairs :], projected[len(rest) :], rtol=1e-3, atol=1e-4)
