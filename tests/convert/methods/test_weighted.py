"""`weighted`: exact without text too, what it allocates, and what it loses less than the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from factoring import energies, every_pair, factor, full_rank
from records import blocks_of, inputs, loss, measured, random, record

from attention.forward import attention_output
from attention.record import Attention
from attention.rope import Rotary
from convert.methods import load_latent
from convert.methods.distances import waves_at
from convert.methods.frequencies import pairs_by_loss, pairs_by_stride
from convert.methods.latent import Allocation, rotary_of
from convert.methods.statistics import Attended, Statistics
from convert.methods.weighted import RopeKeys


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


# ---- rotary components, against sums over distances ---------------------------------------------------------------------


def keys_of(a: Attention, text: bool = True) -> RopeKeys:
    return RopeKeys.of(a, measured(inputs(a.q.shape[2])) if text else Statistics.assumed(a.q.shape[2]))


@pytest.mark.parametrize("text", [False, True])
def test_all_components_together_are_the_keys(text: bool) -> None:
    keys = keys_of(record(3, 2, 4, 1, 30), text)
    every = tuple(pair for pair in range(4) for _ in range(3))
    whole = torch.einsum("hlm,me->hle", *keys.kept(every))
    torch.testing.assert_close(whole, keys.z.repeat_interleave(2, 0), rtol=1e-9, atol=1e-9)
    assert not keys.split(every)[1].any(), "nothing but rounding is left"


def test_what_does_not_turn_is_the_mean_over_the_distances() -> None:
    a = record(2, 2, 3, 0, 30)
    keys = keys_of(a)
    coefficients, shared = keys.kept((1,))
    rest = torch.complex(*keys.split((1,))[1].unflatten(1, (2, 3)).unbind(1))  # half-split, as the record's
    distance = torch.arange(keys.mass.shape[1], dtype=torch.float64)
    for h in range(4):
        left = keys.z[h // 2] - coefficients[h] @ shared
        turned = torch.exp(-1j * distance[:, None] * rotary_of(a).frequencies)[..., None] * left
        torch.testing.assert_close(rest[h], (keys.mass[h][:, None, None] * turned).sum(0), rtol=1e-9, atol=1e-9)


def test_what_a_component_loses_is_what_not_turning_costs() -> None:
    """MHA, one head: λ² E|z|² (1 − |φ|²) at each frequency."""
    keys = keys_of(record(1, 1, 4, 0, 30))
    energy = torch.einsum("gle,gle->l", keys.moved, keys.z.conj()).real
    expected = keys.importance[0].square() * energy * (1 - keys.phase[0].abs().square())
    torch.testing.assert_close(keys.components[0][:, 0], expected / expected.sum(), rtol=1e-9, atol=0)


def test_heads_that_copy_count_more() -> None:
    a = record(2, 1, 4, 0, 30)
    plain = keys_of(a).components[0]
    both = dataclasses.replace(keys_of(a), copying=torch.tensor([1 / 3, 1 / 3], dtype=torch.float64)).components[0]
    torch.testing.assert_close(both, 2 * plain, rtol=1e-9, atol=0)
    one = dataclasses.replace(keys_of(a), copying=torch.tensor([1 / 3, 0.0], dtype=torch.float64)).components[0]
    assert ((one > plain) & (one < both)).any()


def test_phases_turn_as_the_sequence_does() -> None:
    """LongRoPE: beyond its limit all of a sequence rotates by the long list, in the attention and in the phases."""
    short, long = (torch.tensor(values, dtype=torch.float64) for values in ([1.0, 0.3, 0.1], [0.5, 0.1, 0.01]))
    a = dataclasses.replace(record(2, 2, 3, 0, 20), rotary=Rotary(short, long_frequencies=long, long_beyond=20))
    for tokens, expected in ((20, short), (21, long)):
        waves = waves_at(rotary_of(a), RopeKeys.of(a, measured(inputs(20, tokens=tokens))).mass)
        torch.testing.assert_close(waves[1], torch.exp(-1j * expected))
