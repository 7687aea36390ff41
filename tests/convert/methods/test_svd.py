"""`svd`: complex components of the weights, and the singular values that it leaves out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from records import energies, factor, full_rank, loss, random, record, turned_copies, unturning

from convert.methods.latent import Allocation


def test_equal_heads_that_turn_leave_a_latent_of_the_values_rank() -> None:
    a = turned_copies(record(groups=4, width=30))
    a = dataclasses.replace(a, v=torch.einsum("gdr,re->gde", random(4, 6, 5, seed=6), random(5, 30, seed=4) * 0.3))
    assert loss(a, factor("svd", a, Allocation(5, (0, 1, 2)))) < 1e-5
    assert loss(a, factor("svd", a, Allocation(4, (0, 1, 2)))) > 1e-3


def test_svd_errs_by_the_singular_values_that_it_leaves_out() -> None:
    a, kept = record(groups=3, pairs=3, nope=1, width=40, biased=False), (0, 0, 1, 2)
    whole = unturning(factor("svd", a, Allocation(full_rank(a, kept), kept)), 2)
    singular = torch.linalg.svdvals(whole)
    assert singular[full_rank(a, kept) - 1] > 1e-3, "the rank of what is nope is the full rank"
    assert singular[full_rank(a, kept)] < 1e-5
    errors = []
    for rank in range(1, full_rank(a, kept), 4):
        errors.append(float((unturning(factor("svd", a, Allocation(rank, kept)), 2) - whole).square().sum()))
        assert errors[-1] == pytest.approx(float(singular[rank:].square().sum()), rel=1e-4)
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("attention_factor", [1.0, 1.25])
def test_the_losses_of_svd_are_the_energies_of_what_turns(attention_factor: float) -> None:
    a = record(groups=3, pairs=3, nope=2, width=40, factor=attention_factor)
    table = energies(a)
    assert table.shape == (3, 3)
    assert (table[:, :-1] >= table[:, 1:]).all()
    assert float(table.sum()) == pytest.approx(float(a.k[:, :6].square().sum()) * attention_factor**4, rel=1e-5)
    for kept in ((0,), (0, 0, 2), (1, 1, 1, 2)):
        found = factor("svd", a, Allocation(full_rank(a, kept), kept)).k_rope.square().sum()
        expected = sum(table[pair, kept[:i].count(pair)] for i, pair in enumerate(kept))
        assert float(found) == pytest.approx(float(expected), rel=1e-5)
