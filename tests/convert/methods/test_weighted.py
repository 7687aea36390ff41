"""`weighted`: exact without text too, what it allocates, and what it loses less than the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from records import blocks_of, energies, every_pair, factor, full_rank, inputs, loss, measured, random, record

from attention.forward import attention_output
from convert.methods import load_latent
from convert.methods.frequencies import pairs_by_loss, pairs_by_stride
from convert.methods.latent import Allocation
from convert.methods.statistics import Attended, Statistics


@pytest.mark.parametrize("text", [False, True])
def test_weighted_allocates_as_many_frequencies_as_there_are_pairs_to_keep(text: bool) -> None:
    method, size = load_latent("weighted"), Allocation(8, ())
    layers = [record(groups=2, pairs=4, width=30, seed=seed) for seed in range(3)]
    found = [method.measure(a, measured(inputs(30)) if text else Statistics.assumed(30)) for a in layers]  # type: ignore[misc]
    for count in range(1, 9):
        pairs = method.allocate(found, count, size)
        assert len(pairs) == count
        assert set(pairs) <= {0, 1, 2, 3}


def test_weighted_loses_less_than_the_others_on_the_text_that_it_saw() -> None:
    for seed in range(2):
        a = record(groups=4, pairs=4, width=60, seed=seed)
        x = inputs(60, tokens=64, seed=seed) * torch.logspace(0, -2, 60)
        measure, allocate = load_latent("weighted").measure, load_latent("weighted").allocate
        assert measure
        own = allocate([measure(a, measured(x))], 6, Allocation(10, ()))
        weighted = loss(a, factor("weighted", a, Allocation(10, own), x), x)
        for other, pairs in (("pca", pairs_by_stride(12, 8)), ("svd", pairs_by_loss([energies(a)], 6))):
            assert weighted < loss(a, factor(other, a, Allocation(10, pairs), x), x), (seed, other)


def test_what_truncation_takes_from_values_on_average_is_a_constant_output() -> None:
    a, x = record(groups=3, width=30, biased=False), inputs(30) + 3 * random(30, seed=5)
    found = factor("weighted", a, Allocation(4, (0, 1, 2)), x)
    mean = x.double().flatten(0, 1).mean(0)
    v = a.v.double().repeat_interleave(2, 0)
    expected = torch.einsum("ehd,hd->e", a.o.double(), (v - found.up_v.double() @ found.down.double()) @ mean)
    torch.testing.assert_close(found.o_bias.double(), expected, rtol=1e-4, atol=1e-4)
    assert loss(a, found, x) < loss(a, dataclasses.replace(found, o_bias=None), x)


@pytest.mark.parametrize("constant", ["within", "read"])
def test_a_covariance_that_is_zero_leaves_full_size_exact(constant: str) -> None:
    """As where every query attends to one token, or all to the same one."""
    a, x = record(4, 1, 2, 2, 40, biased=False), inputs(40, tokens=50)
    known = measured(x)
    seen, zero, mean = known.attended.seen, torch.zeros_like(known.second), torch.zeros_like(known.mean)
    attended = Attended(seen, zero, seen, mean) if constant == "within" else Attended(seen, seen, zero, mean)
    kept = every_pair(a)
    after = load_latent("weighted").factor(
        a, Allocation(full_rank(a, kept), kept), dataclasses.replace(known, attended=attended)
    )
    torch.testing.assert_close(attention_output(after, blocks_of(x)), attention_output(a, blocks_of(x)), rtol=1e-3, atol=1e-4)
