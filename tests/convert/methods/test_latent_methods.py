"""Making a latent, as pure functions of a record: exact at full size, as published below it, finite whatever comes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from records import inputs, loss, measured, random, record, run

from attention.record import Attention, FactoredAttention
from attention.rope import Pairing, Rotary
from convert.methods import LATENT, load_latent
from convert.methods.algebra import fix_signs, leading_subspace
from convert.methods.frequencies import pairs_by_loss, pairs_by_stride
from convert.methods.latent import Allocation, keys_of
from convert.methods.statistics import Statistics
from convert.methods.svd import losses

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


def rotary_dims(a: Attention) -> int:
    assert a.rotary is not None
    return a.rotary.dims


def every_pair(a: Attention) -> tuple[int, ...]:
    return tuple(pair for pair in range(rotary_dims(a) // 2) for _ in range(a.num_kv_heads))


def full_rank(a: Attention, pairs: tuple[int, ...]) -> int:
    return min(a.q.shape[2], 2 * a.k.shape[0] * a.k.shape[1] - 2 * len(pairs))


def factor(name: str, a: Attention, size: Allocation, x: torch.Tensor | None = None) -> FactoredAttention:
    """By a method, with the statistics of `x`."""
    return load_latent(name).factor(a, size, measured(inputs(a.q.shape[2]) if x is None else x))


def energies(a: Attention) -> torch.Tensor:
    """What `svd` allocates by."""
    return losses(a, Statistics.assumed(a.q.shape[2]), 1)


# ---- full size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LATENT)
@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 4), share=st.integers(1, 3), pairs=st.integers(1, 4), nope=st.integers(0, 3),
    width=st.integers(3, 40), pairing=st.sampled_from(PAIRINGS), biased=st.booleans(),
    attention_factor=st.sampled_from([1.0, 1.25]), seed=st.integers(0, 99),
)  # fmt: skip
@example(
    groups=4, share=1, pairs=4, nope=0, width=8, pairing="half", biased=True, attention_factor=1.25, seed=0
)  # MHA, E small
@example(groups=1, share=4, pairs=2, nope=3, width=40, pairing="interleaved", biased=True, attention_factor=1.25, seed=1)  # MQA
@example(groups=2, share=2, pairs=3, nope=2, width=40, pairing="half", biased=False, attention_factor=1.0, seed=2)  # GQA
def test_full_size_is_the_same_function(
    method: str, groups: int, share: int, pairs: int, nope: int, width: int, pairing: Pairing, biased: bool,
    attention_factor: float, seed: int,
) -> None:  # fmt: skip
    a = record(groups, share, pairs, nope, width, pairing, biased, attention_factor, seed)
    kept = every_pair(a)
    found = factor(method, a, Allocation(full_rank(a, kept), kept))
    assert found.down.shape == (full_rank(a, kept), width)
    assert found.k_rope.shape == (groups * 2 * pairs, width)
    assert loss(a, found) < 1e-5


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize("name", ["q_bias", "k_bias", "v_bias", "o_bias"])
def test_each_bias_has_a_place(method: str, name: str) -> None:
    whole = record(nope=2)
    a = dataclasses.replace(record(nope=2, biased=False), **{name: getattr(whole, name)})
    kept = every_pair(a)
    found = factor(method, a, Allocation(full_rank(a, kept), kept))
    assert loss(a, found) < 1e-5
    assert (run(a, inputs(20)) - run(record(nope=2, biased=False), inputs(20))).abs().max() > 1e-3


@pytest.mark.parametrize("method", LATENT)
def test_the_order_of_frequencies_is_that_of_size_and_the_list_of_longrope_follows(method: str) -> None:
    a = record()
    assert a.rotary is not None
    a = dataclasses.replace(a, rotary=dataclasses.replace(a.rotary, long_frequencies=a.rotary.frequencies / 3, long_beyond=10))
    kept = every_pair(a)
    found = factor(method, a, Allocation(full_rank(a, kept), kept))
    assert torch.equal(found.rotary.frequencies, a.rotary.frequencies[list(kept)])
    assert (found.rotary.pairing, found.rotary.attention_factor, found.rotary.long_beyond) == ("interleaved", 1.0, 10)
    short, long = inputs(20)[:, :9], inputs(20)
    assert loss(a, found, short) < 1e-5
    assert loss(a, found, long) < 1e-5
    lacking = dataclasses.replace(found, rotary=dataclasses.replace(found.rotary, long_frequencies=None))
    assert loss(a, lacking, long) > 1e-2


# ---- less than full size -------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(2, 4), share=st.integers(1, 2), pairs=st.integers(1, 3), pairing=st.sampled_from(PAIRINGS),
    attention_factor=st.sampled_from([1.0, 1.25]), seed=st.integers(0, 99),
)  # fmt: skip
def test_heads_that_are_turned_copies_need_one_component_each(
    groups: int, share: int, pairs: int, pairing: Pairing, attention_factor: float, seed: int
) -> None:
    a = turned_copies(record(groups, share, pairs, 0, 30, pairing, True, attention_factor, seed))
    kept = tuple(range(pairs))
    assert pairs_by_loss([energies(a)], pairs) == kept
    assert loss(a, factor("svd", a, Allocation(full_rank(a, kept), kept))) < 1e-5


def turned_copies(a: Attention) -> Attention:
    """Every KV head's key is the first one's, each frequency rotated by an angle and scaled by a factor of its own."""
    assert a.rotary is not None
    assert a.k_bias is not None
    numbers, bias = a.rotary.to_complex(a.k)[0], a.rotary.to_complex(a.k_bias)[0]
    rotation = torch.complex(*random(2, a.num_kv_heads, numbers.shape[1], seed=3))
    k = a.rotary.from_complex(rotation[..., None] * numbers[:1])
    return dataclasses.replace(a, k=k, k_bias=a.rotary.from_complex(rotation * bias[:1]))


def test_a_real_rotation_cannot_undo_turned_copies() -> None:
    a, kept = turned_copies(record(groups=4, width=30)), (0, 1, 2)
    assert loss(a, factor("pca", a, Allocation(full_rank(a, kept), kept))) > 1e-2


@pytest.mark.parametrize("method", LATENT)
def test_a_true_rank_is_found_and_less_than_that_loses(method: str) -> None:
    a, kept = record(groups=4, nope=2, width=30), every_pair(record(groups=4, nope=2))
    shared = random(5, 30, seed=4) * 0.3  # unrotated keys and values all come from five numbers
    k = torch.cat((a.k[:, :6], torch.einsum("gdr,re->gde", random(4, 2, 5, seed=5), shared)), 1)
    a = dataclasses.replace(a, k=k, v=torch.einsum("gdr,re->gde", random(4, 8, 5, seed=6), shared))
    found = {rank: loss(a, factor(method, a, Allocation(rank, kept))) for rank in (1, 3, 4, 5, 6)}
    assert found[5] < 1e-5
    assert found[6] < 1e-5
    assert found[4] > 1e-3
    assert found[1] > found[3] > found[4]


def test_equal_heads_that_turn_leave_a_latent_of_the_values_rank() -> None:
    a = turned_copies(record(groups=4, width=30))
    a = dataclasses.replace(a, v=torch.einsum("gdr,re->gde", random(4, 6, 5, seed=6), random(5, 30, seed=4) * 0.3))
    assert loss(a, factor("svd", a, Allocation(5, (0, 1, 2)))) < 1e-5
    assert loss(a, factor("svd", a, Allocation(4, (0, 1, 2)))) > 1e-3


@pytest.mark.parametrize("times", [2, 4])
def test_pca_of_exact_copies_is_lossless_where_each_has_its_component(times: int) -> None:
    few = record(groups=2, width=40)
    names = ("k", "v", "k_bias", "v_bias")
    a = dataclasses.replace(few, **{name: getattr(few, name).repeat_interleave(times, 0) for name in names})
    a = dataclasses.replace(a, q=random(2 * times, 6, 40, seed=8) * 0.2, o=random(40, 2 * times, 6, seed=9) * 0.2,
                            q_bias=None)  # fmt: skip
    kept = every_pair(few)
    assert loss(a, factor("svd", a, Allocation(12, kept))) < 1e-5
    assert loss(a, factor("pca", a, Allocation(12, kept))) < 1e-5


def unturning(a: FactoredAttention, share: int) -> torch.Tensor:
    """Unrotated keys and values as the latent gives them, one row per dim of each KV head."""
    return torch.cat((a.up_k[::share] @ a.down, a.up_v[::share] @ a.down)).flatten(0, 1).double()


def test_svd_errs_by_the_singular_values_that_it_leaves_out() -> None:
    a, kept = record(groups=3, pairs=3, nope=1, width=40, biased=False), (0, 0, 1, 2)
    whole = unturning(factor("svd", a, Allocation(full_rank(a, kept), kept)), 2)
    singular = torch.linalg.svdvals(whole)
    assert singular[full_rank(a, kept) - 1] > 1e-3, "the rank of what does not turn is the full rank"
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


@pytest.mark.parametrize("method", LATENT)
def test_less_is_lost_with_more_of_either(method: str) -> None:
    a = record(groups=4, pairs=4, width=60)
    by_rank = [loss(a, factor(method, a, Allocation(rank, every_pair(a)))) for rank in (4, 12, 20, 28, 32)]
    by_rope = [loss(a, factor(method, a, Allocation(60, pairs_by_stride(dims, 8)))) for dims in (8, 16, 24, 32)]
    for losses_seen in (by_rank, by_rope):
        assert losses_seen == sorted(losses_seen, reverse=True)
        assert losses_seen[0] > 0.05
        assert losses_seen[-1] < 1e-5


# ---- frequency folding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("fold", [2, 4])
def test_folding_is_exact_where_the_folded_frequencies_are_equal(fold: int, pairing: Pairing) -> None:
    a = record(groups=2, pairs=4, nope=1, width=40, pairing=pairing)
    different, kept = factor("pca", a, Allocation(40 - 4, every_pair(a), fold)), every_pair(a)
    equal = (1.3 * 0.4 ** torch.arange(4 // fold, dtype=torch.float64)).repeat_interleave(fold)
    same = dataclasses.replace(a, rotary=Rotary(equal, pairing))
    assert loss(same, factor("pca", same, Allocation(full_rank(same, kept), kept, fold))) < 1e-5
    assert loss(a, different) > 1e-2


@pytest.mark.parametrize("fold", [2, 4])
def test_folded_frequencies_share_their_components(fold: int) -> None:
    """Keys whose rows within a band are real multiples of one: a single component of each band carries them all."""
    a, bands = record(groups=2, pairs=4, width=40, biased=False), 4 // fold
    assert a.rotary is not None
    numbers = a.rotary.to_complex(a.k)[0][:1, :bands].repeat_interleave(fold, 1) * random(2, 4, 1, seed=3)
    equal = (1.3 * 0.4 ** torch.arange(bands, dtype=torch.float64)).repeat_interleave(fold)
    rotary = Rotary(equal)
    a = dataclasses.replace(a, k=rotary.from_complex(numbers), rotary=rotary)
    kept = pairs_by_stride(2 * bands, 8)
    assert kept == tuple(range(0, 4, fold))
    assert loss(a, factor("pca", a, Allocation(full_rank(a, kept), kept, fold))) < 1e-5
    single = dataclasses.replace(a, k=random(2, 8, 40, seed=11))
    assert loss(single, factor("pca", single, Allocation(full_rank(a, kept), kept, fold))) > 1e-2


# ---- the published formula -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [1, 2])
def test_pca_is_the_published_formula(fold: int) -> None:
    """Recomputed in numpy from the formula: the kept key per band, ρ, and the joint subspace."""
    groups, pairs, width, rank = 3, 4, 30, 9
    a, x = record(groups, 2, pairs, 0, width), inputs(30)
    kept = tuple(pair for pair in range(0, pairs, fold) for _ in range(fold))
    found = factor("pca", a, Allocation(rank, kept, fold), x)

    k, v = (tensor.double().numpy() for tensor in (a.k, a.v))
    assert a.k_bias is not None
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


def test_pca_looks_at_the_text() -> None:
    a, size = record(groups=4, width=30, biased=False), Allocation(8, (0, 1, 2))
    texts = [inputs(30) * torch.logspace(0, -3, 30), inputs(30) * torch.logspace(-3, 0, 30)]
    own, other = (factor("pca", a, size, x) for x in texts)
    assert loss(a, own, texts[0]) < 0.5 * loss(a, other, texts[0])
    assert loss(a, other, texts[1]) < 0.8 * loss(a, own, texts[1])


# ---- the subspace --------------------------------------------------------------------------------------------------


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


def test_the_attention_factor_is_in_the_keys_twice() -> None:
    plain, scaled = (keys_of(record(nope=2, factor=f)) for f in (1.0, 1.5))
    torch.testing.assert_close(scaled.rows, 2.25 * plain.rows)
    torch.testing.assert_close(scaled.bias, 2.25 * plain.bias)
    assert torch.equal(scaled.nope, plain.nope)


# ---- whatever comes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LATENT)
def test_the_same_record_gives_the_same_bits(method: str) -> None:
    a = record(groups=4, nope=1, width=30)
    once, again = (factor(method, a, Allocation(9, (0, 0, 1, 2))) for _ in range(2))
    for field in dataclasses.fields(once):
        value = getattr(once, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(again, field.name)), field.name


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize("width", [8, 40])
def test_a_constant_input_has_a_singular_moment_and_full_size_stays_exact(method: str, width: int) -> None:
    a, constant = record(groups=2, width=width), inputs(width)[:1, :1].expand(2, 24, width)
    kept = every_pair(a)
    found = factor(method, a, Allocation(full_rank(a, kept), kept), constant)
    assert loss(a, found) < 1e-4
    few = factor(method, a, Allocation(3, (0, 1, 2)), constant)
    assert torch.isfinite(run(few, inputs(width))).all()


def damaged(a: Attention, what: str) -> Attention:
    tensors = {name: getattr(a, name).clone() for name in ("q", "k", "v")}
    if what == "dead key":
        tensors["k"][1] = 0
    elif what == "dead value":
        tensors["v"][0] = 0
    elif what == "dead query":
        tensors["q"][0] = 0
    elif what == "dead pair":
        tensors["k"][:, ::3] = 0
    else:
        tensors[what[-1]].zero_()
    return dataclasses.replace(a, **tensors)


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize("width", [10, 40])
@pytest.mark.parametrize("what", ["dead key", "dead value", "dead query", "dead pair"])
def test_dead_heads_are_finite_and_exact_at_full_size(method: str, width: int, what: str) -> None:
    a = damaged(record(groups=3, width=width, biased=False), what)
    kept = every_pair(a)
    assert loss(a, factor(method, a, Allocation(full_rank(a, kept), kept))) < 1e-5
    assert torch.isfinite(run(factor(method, a, Allocation(4, (0, 1, 2))), inputs(width))).all()


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize("what", ["zero k", "zero v"])
def test_nothing_at_all_is_finite_and_right(what: str, method: str) -> None:
    a = damaged(record(groups=3, width=40, biased=False), what)
    found, x = factor(method, a, Allocation(18, (0, 1, 2))), inputs(40)
    assert torch.isfinite(run(found, x)).all()
    if what == "zero k":  # all 18 values fit; with no values nothing is to be seen
        assert loss(a, found) < 1e-5
    else:
        assert run(found, x).abs().max() < 1e-5
    assert torch.isfinite(energies(a)).all()
    assert len(pairs_by_loss([energies(a)], 3)) == 3


@pytest.mark.parametrize("method", LATENT)
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_extreme_scales_are_as_good_as_any(method: str, scale: float) -> None:
    a = record(groups=2, width=30, biased=False)
    extreme = dataclasses.replace(a, k=a.k * scale, v=a.v * scale, q=a.q / scale, o=a.o / scale)
    size = Allocation(8, (0, 1, 2))
    assert loss(extreme, factor(method, extreme, size)) == pytest.approx(loss(a, factor(method, a, size)), rel=1e-2)


@pytest.mark.parametrize("name", LATENT)
def test_the_registry_names_each_method_by_its_module(name: str) -> None:
    method = load_latent(name)
    assert method.name == name
    assert method.summary
    assert (method.measure is None) == method.folds


# ---- weighted ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 4), share=st.integers(1, 3), pairs=st.integers(1, 4), nope=st.integers(0, 3),
    width=st.integers(3, 40), pairing=st.sampled_from(PAIRINGS), biased=st.booleans(), gains=st.booleans(),
    attention_factor=st.sampled_from([1.0, 1.25]), seed=st.integers(0, 99),
)  # fmt: skip
def test_weighted_is_the_same_function_at_full_size_without_text(
    groups: int, share: int, pairs: int, nope: int, width: int, pairing: Pairing, biased: bool, gains: bool,
    attention_factor: float, seed: int,
) -> None:  # fmt: skip
    a = record(groups, share, pairs, nope, width, pairing, biased, attention_factor, seed)
    kept = every_pair(a)
    known = Statistics.assumed(width, *(random(2, width, seed=seed + 1) if gains else ()))
    assert loss(a, load_latent("weighted").factor(a, Allocation(full_rank(a, kept), kept), known)) < 1e-5


@pytest.mark.parametrize("method", LATENT)
@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 4), share=st.integers(1, 2), dim=st.integers(1, 6), width=st.integers(3, 40),
    biased=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_without_positions_the_latent_alone_is_the_same_function(
    method: str, groups: int, share: int, dim: int, width: int, biased: bool, seed: int
) -> None:
    a = record(groups, share, 0, dim, width, "half", biased, 1.0, seed)
    elsewhere = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
    found = factor(method, a, Allocation(min(width, 2 * groups * dim), (0, 1, 1), rotary=elsewhere))
    assert not found.k_rope.any()
    assert loss(a, found) < 1e-5


@settings(max_examples=20, deadline=None)
@given(
    groups=st.integers(2, 4), share=st.integers(1, 2), pairs=st.integers(1, 3), pairing=st.sampled_from(PAIRINGS),
    attention_factor=st.sampled_from([1.0, 1.25]), seed=st.integers(0, 99),
)  # fmt: skip
def test_weighted_needs_one_component_for_heads_that_are_turned_copies(
    groups: int, share: int, pairs: int, pairing: Pairing, attention_factor: float, seed: int
) -> None:
    a = turned_copies(record(groups, share, pairs, 0, 30, pairing, True, attention_factor, seed))
    kept = tuple(range(pairs))
    assert loss(a, factor("weighted", a, Allocation(full_rank(a, kept), kept))) < 1e-5


@pytest.mark.parametrize("text", [False, True])
def test_weighted_allocates_as_many_frequencies_as_there_are_pairs_to_keep(text: bool) -> None:
    method, size = load_latent("weighted"), Allocation(8, ())
    layers = [record(groups=2, pairs=4, width=30, seed=seed) for seed in range(3)]
    found = [method.measure(a, measured(inputs(30)) if text else Statistics.assumed(30), 1) for a in layers]  # type: ignore[misc]
    for count in range(1, 9):
        sizes = method.allocate(found, count, size)
        assert [len(s.pairs) for s in sizes] == [count] * len(sizes)
        assert [s.pursued for s in sizes] == ([False, True] if text and count < 4 else [False])
        assert all(s.rank == 8 and set(s.pairs) <= {0, 1, 2, 3} for s in sizes)


def test_weighted_loses_less_than_the_others_on_the_text_that_it_saw() -> None:
    for seed in range(4):
        a = record(groups=4, pairs=4, width=60, seed=seed)
        x = inputs(60, tokens=64, seed=seed) * torch.logspace(0, -2, 60)
        measure, allocate = load_latent("weighted").measure, load_latent("weighted").allocate
        assert measure
        (own, *_) = allocate([measure(a, measured(x), 6)], 6, Allocation(10, ()))
        weighted = loss(a, factor("weighted", a, own, x), x)
        for other, pairs in (("pca", pairs_by_stride(12, 8)), ("svd", pairs_by_loss([energies(a)], 6))):
            assert weighted < loss(a, factor(other, a, Allocation(10, pairs), x), x), (seed, other)


def test_what_truncation_takes_from_values_on_average_is_a_constant_output() -> None:
    a, x = record(groups=3, width=30, biased=False), inputs(30) + 3 * random(30, seed=5)
    found = factor("weighted", a, Allocation(4, (0, 1, 2)), x)
    assert found.o_bias is not None
    mean = x.double().flatten(0, 1).mean(0)
    v = a.v.double().repeat_interleave(2, 0)
    expected = torch.einsum("ehd,hd->e", a.o.double(), (v - found.up_v.double() @ found.down.double()) @ mean)
    torch.testing.assert_close(found.o_bias.double(), expected, rtol=1e-4, atol=1e-4)
    assert loss(a, found, x) < loss(a, dataclasses.replace(found, o_bias=None), x)
