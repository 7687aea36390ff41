"""What methods that make a latent promise each by itself, as `pca` a published formula, and the algebra that all share."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import records
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import every_pair, factor, full_rank, inputs, loss, measured, random, record, run, turned_copies, unturning

from attention.rope import Pairing, Rotary
from convert.methods import load_latent
from convert.methods.algebra import fix_signs, leading_subspace
from convert.methods.frequencies import pairs_by_loss, pairs_by_stride
from convert.methods.latent import Allocation
from convert.methods.statistics import Attended, Statistics


def test_a_real_rotation_cannot_undo_turned_copies() -> None:
    a, kept = turned_copies(record(groups=4, width=30)), (0, 1, 2)
    assert loss(a, factor("pca", a, Allocation(full_rank(a, kept), kept))) > 1e-2


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
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
    table = records.energies(a)
    assert table.shape == (3, 3)
    assert (table[:, :-1] >= table[:, 1:]).all()
    assert float(table.sum()) == pytest.approx(float(a.k[:, :6].square().sum()) * attention_factor**4, rel=1e-5)
    for kept in ((0,), (0, 0, 2), (1, 1, 1, 2)):
        found = factor("svd", a, Allocation(full_rank(a, kept), kept)).k_rope.square().sum()
        expected = sum(table[pair, kept[:i].count(pair)] for i, pair in enumerate(kept))
        assert float(found) == pytest.approx(float(expected), rel=1e-5)


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
        for other, pairs in (("pca", pairs_by_stride(12, 8)), ("svd", pairs_by_loss([records.energies(a)], 6))):
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
    torch.testing.assert_close(run(after, x), run(a, x), rtol=1e-3, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), width=st.integers(1, 12), weighted=st.booleans(), data=st.data())
def test_the_leading_subspace_keeps_as_much_as_any(count: int, width: int, weighted: bool, data: Any) -> None:
    rank = data.draw(st.integers(1, min(count, width)))
    rows, root = random(count, width), random(width, width, seed=1).double()
    found = leading_subspace(rows, root @ root.T if weighted else None, rank).double()
    assert found.shape == (count, rank)
    torch.testing.assert_close(found.T @ found, torch.eye(rank).double(), rtol=1e-5, atol=1e-5)
    images = rows.double() @ root if weighted else rows.double()
    kept = (found.T @ images).square().sum()
    assert float(kept) == pytest.approx(float(torch.linalg.svdvals(images)[:rank].square().sum()), rel=1e-5)


def test_signs_are_fixed_by_the_largest_entry() -> None:
    vectors = torch.linalg.qr(torch.complex(random(5, 5), random(5, 5, seed=1)).to(torch.complex128)).Q
    rotated = vectors * torch.exp(1j * random(5, seed=2).double())
    found = fix_signs(rotated)
    torch.testing.assert_close(found, fix_signs(vectors), rtol=1e-12, atol=1e-12)
    largest = found.gather(0, found.abs().argmax(0, keepdim=True))[0]
    assert (largest.real > 0).all()
    assert largest.imag.abs().max() < 1e-12
    torch.testing.assert_close(found.abs(), vectors.abs(), rtol=1e-12, atol=1e-12)
    assert torch.isfinite(torch.view_as_real(fix_signs(torch.zeros(3, 2, dtype=torch.complex128)))).all()
