"""Least squares after a method: what it may not make worse, what it must find, and that its gradient is one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import factored, inputs, loss, measured, random, record, run

from attention.forward import causal_softmax, heads_of, output_error
from attention.record import Attention, FactoredAttention, Record
from convert.calibration.refit import OutputFit, _HeadFit, refitted_queries
from convert.methods import load_grouped, load_latent
from convert.methods.grouped import Draw
from convert.methods.latent import Allocation

X = inputs(20, tokens=32, blocks=4)


def merged(a: Attention, groups: int, method: str = "aligned") -> Attention:
    return load_grouped(method).merge(a, groups, Draw(torch.Generator().manual_seed(0), 0.02), measured(X))


def latent(a: Attention, rank: int, pairs: tuple[int, ...], method: str = "weighted") -> FactoredAttention:
    return load_latent(method).factor(a, Allocation(rank, pairs), measured(X))


# ---- queries ---------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    share=st.integers(1, 2), pairs=st.integers(1, 3), nope=st.integers(0, 2), biased=st.booleans(),
    pairing=st.sampled_from(["half", "interleaved"]), method=st.sampled_from(["aligned", "mean", "weighted", "svd"]),
    factor=st.sampled_from([1.0, 1.2]), seed=st.integers(0, 50),
)  # fmt: skip
def test_fitted_queries_never_do_worse(
    share: int, pairs: int, nope: int, biased: bool, pairing: str, method: str, factor: float, seed: int
) -> None:
    a = record(4, share, pairs, nope, 20, pairing, biased, factor, seed)  # type: ignore[arg-type]
    after: Record = merged(a, 2, method) if method in ("aligned", "mean") else latent(a, 6, (0,), method)
    fitted = refitted_queries(a, after, X)
    assert output_error(a, fitted, X) <= output_error(a, after, X)


def test_fitted_queries_do_much_better_where_there_is_something_to_gain() -> None:
    for seed in range(3):
        a = record(4, 1, 3, 2, 20, seed=seed)
        for after in (merged(a, 2, "mean"), latent(a, 6, (0,), "svd")):
            fitted = refitted_queries(a, after, X)
            assert output_error(a, fitted, X) < 0.95 * output_error(a, after, X)
            # What was fitted on one text holds on another of the same kind.
            other = inputs(20, tokens=32, blocks=4, seed=7) + 0.1 * random(4, 32, 20, seed=99)
            assert output_error(a, fitted, other) < output_error(a, after, other)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("nope", [0, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_what_is_exact_stays_exact(biased: bool, nope: int, pairing: str) -> None:
    a = record(2, 2, 3, nope, 20, pairing, biased)  # type: ignore[arg-type]
    every = (0, 0, 1, 1, 2, 2)
    whole = latent(a, min(20, 2 * 2 * (6 + nope) - 12), every)
    names = [name for name in ("k", "v", "k_bias", "v_bias") if getattr(a, name) is not None]
    twice = dataclasses.replace(a, **{name: getattr(a, name).repeat_interleave(2, 0) for name in names})
    for before, after in ((a, whole), (a, a), (twice, merged(twice, 2))):
        assert loss(before, after, X) < 1e-5
        assert loss(before, refitted_queries(before, after, X), X) < 1e-5


def perturbed_heads(count: int, dim: int, seed: int = 3) -> torch.Tensor:
    """`[heads, D, D]` near the identity."""
    return torch.eye(dim) + 0.3 * random(count, dim, dim, seed=seed) * dim**-0.5


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("nope", [0, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_queries_of_gqa_that_were_spoilt_are_restored(biased: bool, nope: int, pairing: str) -> None:
    a = record(2, 2, 3, nope, 20, pairing, biased)  # type: ignore[arg-type]
    maps = perturbed_heads(4, 6 + nope)
    bias = None if a.q_bias is None else (maps @ a.q_bias[..., None])[..., 0]
    spoilt = dataclasses.replace(a, q=maps @ a.q, q_bias=bias)
    fitted = refitted_queries(a, spoilt, X)
    assert output_error(a, spoilt, X) > 1e-3
    assert output_error(a, fitted, X) < 0.05 * output_error(a, spoilt, X)


@pytest.mark.parametrize("biased", [False, True])
def test_queries_of_mla_that_were_spoilt_are_restored(biased: bool) -> None:
    a = record(2, 2, 3, 2, 20, "half", biased)
    whole = latent(a, 20, (0, 0, 1, 1, 2, 2))
    maps = perturbed_heads(4, whole.q_rope.shape[1])
    bias = None if whole.q_rope_bias is None else (maps @ whole.q_rope_bias[..., None])[..., 0]
    spoilt = dataclasses.replace(
        whole, q_rope=maps @ whole.q_rope, q_rope_bias=bias, up_k=perturbed_heads(4, 8, 4) @ whole.up_k
    )
    fitted = refitted_queries(a, spoilt, X)
    assert isinstance(fitted, FactoredAttention)
    assert output_error(a, spoilt, X) > 1e-3
    assert output_error(a, fitted, X) < 0.05 * output_error(a, spoilt, X)
    changed = {
        field.name
        for field in dataclasses.fields(fitted)
        if getattr(fitted, field.name) is not getattr(spoilt, field.name)
    }  # fmt: skip
    assert changed == {"up_k", "q_rope"} | ({"q_rope_bias"} if biased else set())


def test_only_queries_of_gqa_change() -> None:
    a = record(4, 1, 3, 0, 20)
    after = merged(a, 2, "mean")
    fitted = refitted_queries(a, after, X)
    changed = {f.name for f in dataclasses.fields(fitted) if getattr(fitted, f.name) is not getattr(after, f.name)}
    assert changed == {"q", "q_bias"}


@pytest.mark.parametrize("norm", ["shared", "head", "all", "after"])
def test_a_norm_of_queries_and_keys_leaves_them_as_they_are(norm: str) -> None:
    a = record(4, 1, 3, 0, 20, norm=norm)
    after = merged(a, 2)
    assert refitted_queries(a, after, X) is after


def test_the_same_sample_gives_the_same_bits() -> None:
    a = record(4, 2, 3, 2, 20)
    once, again = (refitted_queries(a, merged(a, 2), X) for _ in range(2))
    assert isinstance(once, Attention)
    assert isinstance(again, Attention)
    assert torch.equal(once.q, again.q)


@pytest.mark.parametrize("what", ["q", "k", "v", "o"])
def test_heads_of_zeros_stay_finite(what: str) -> None:
    a = record(4, 1, 3, 2, 20)
    tensor = getattr(a, what).clone()
    (tensor[:, :2] if what == "o" else tensor[:2]).zero_()
    a = dataclasses.replace(a, **{what: tensor})
    for after in (merged(a, 2), latent(a, 6, (0, 1))):
        assert torch.isfinite(run(refitted_queries(a, after, X), X)).all()


# ---- the objective ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [False, True])
@pytest.mark.parametrize("case", ["gqa", "gqa, interleaved, partial", "mla"])
def test_the_gradient_is_that_of_the_squared_error(case: str, target: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """½ Σ_t Var_{s ~ p_t} of what is missing of the logits, spelled out for one token after another."""
    monkeypatch.setattr("attention.forward._SPAN", 7)  # blocks are not a multiple of it
    a = record(4, 1, 2, 2 if "partial" in case else 0, 20, "interleaved" if "inter" in case else "half")
    after: Record = latent(a, 5, (0, 1)) if case == "mla" else merged(a, 2)
    blocks, head = [(heads_of(a, x), heads_of(after, x)) for x in X], 1
    columns = sum(part.shape[-1] for part in blocks[0][1].kept(head))
    leaf = (0.1 * random(a.q.shape[1], columns, seed=5)).double().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for source, result in blocks:
        query, attended = source.plain[head].double(), causal_softmax(source.logits(head)).double()
        nope, rope = (part.double() for part in result.kept(head))
        missing = (source.logits(head) - result.logits(head)).double()
        for t in range(len(query)):
            moved, p = query[t] @ leaf, attended[t, : t + 1]
            rotated = result.rotation(moved[nope.shape[1] :].expand(len(query), -1))[t]
            got = result.scale * (nope[: t + 1] @ moved[: nope.shape[1]] + rope[: t + 1] @ rotated)
            error = got - missing[t, : t + 1] if target else got
            total = total + 0.5 * (p * (error - (p * error).sum()).square()).sum()
    (expected,) = torch.autograd.grad(total, leaf)
    fit = _HeadFit.of(blocks, head)
    found = fit.curvature(leaf.detach().float()) - (fit.wanted() if target else 0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_of_a_long_block_some_spans_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    a = record(4, 1, 2, 2, 20)
    after = merged(a, 2)
    blocks = [(heads_of(a, x), heads_of(after, x)) for x in X]
    count = len(X[0])
    monkeypatch.setattr("attention.forward._SPAN", count // 8)
    whole = _HeadFit.of(blocks, 1).spans
    monkeypatch.setattr("convert.calibration.refit._TOKENS", count // 4)
    some = _HeadFit.of(blocks, 1).spans
    assert (len(whole), len(some)) == (8 * len(X), 2 * len(X))
    assert [span.weights.shape[1] for span in some[:2]] == [3 * (count // 8), 7 * (count // 8)]
    assert loss(a, refitted_queries(a, after, X), X) < loss(a, after, X)


# ---- outputs ---------------------------------------------------------------------------------------------------------


def reads(record_: Record, tokens: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = record_.o.shape[1] * record_.o.shape[2]
    read = random(3, tokens, width, seed=seed) @ (torch.eye(width) + 0.3 * random(width, width, seed=seed + 1)) + 0.5
    return read, random(3, tokens, record_.o.shape[0], seed=seed + 2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [record, factored])
def test_the_output_is_ridge_regression_of_what_is_missing(kind: type, biased: bool) -> None:
    a: Record = kind(biased=biased)
    read, target = reads(a)
    fit = OutputFit(a)
    for part in range(3):
        fit.see(read[part : part + 1], target[part : part + 1])
    found = fit.record()
    x, y = read.flatten(0, 1).double(), target.flatten(0, 1).double()
    missing = y - x @ a.o.double().flatten(1).T
    if biased:
        assert a.o_bias is not None
        missing = missing - a.o_bias.double()
        centre, shift = x.mean(0), missing.mean(0)
    else:
        centre, shift = torch.zeros(x.shape[1]).double(), torch.zeros(y.shape[1]).double()
    square = (x - centre).T @ (x - centre)
    ridge = 1e-3 * square.diagonal().mean()
    # The ridge as rows of its own: one more equation for each coefficient, which wants it to be zero.
    rows = torch.cat((x - centre, ridge.sqrt() * torch.eye(x.shape[1]).double()))
    wanted = torch.cat((missing - shift, torch.zeros(x.shape[1], y.shape[1]).double()))
    change = torch.linalg.lstsq(rows, wanted).solution.T
    torch.testing.assert_close(found.o.double(), a.o.double() + change.view(a.o.shape), rtol=1e-3, atol=1e-4)
    if biased:
        assert found.o_bias is not None
        torch.testing.assert_close(found.o_bias.double(), a.o_bias.double() + shift - change @ centre, rtol=1e-3, atol=1e-4)
    else:
        assert found.o_bias is None
    changed = {f.name for f in dataclasses.fields(found) if getattr(found, f.name) is not getattr(a, f.name)}
    assert changed == ({"o", "o_bias"} if biased else {"o"})


def squared_error(a: Record, read: torch.Tensor, target: torch.Tensor) -> float:
    out = read @ a.o.flatten(1).T + (0 if a.o_bias is None else a.o_bias)
    return float((out - target).square().sum())


@pytest.mark.parametrize("biased", [False, True])
def test_fitted_outputs_are_next_to_the_best_and_never_worse(biased: bool) -> None:
    a = record(biased=biased)
    read, target = reads(a)
    fit = OutputFit(a)
    fit.see(read, target)
    x = read.flatten(0, 1)
    x = torch.cat((x, torch.ones(len(x), 1)), 1) if biased else x
    best = torch.linalg.lstsq(x, target.flatten(0, 1)).solution
    least = float((x @ best - target.flatten(0, 1)).square().sum())
    assert least <= squared_error(fit.record(), read, target) * (1 + 1e-5)
    assert squared_error(fit.record(), read, target) < min(1.05 * least, squared_error(a, read, target))


@pytest.mark.parametrize("biased", [False, True])
def test_where_nothing_is_missing_nothing_is_added(biased: bool) -> None:
    a = record(biased=biased)
    read, _ = reads(a)
    fit = OutputFit(a)
    fit.see(read, read @ a.o.flatten(1).T + (0 if a.o_bias is None else a.o_bias))
    found = fit.record()
    torch.testing.assert_close(found.o, a.o, rtol=1e-5, atol=1e-6)
    if biased:
        assert found.o_bias is not None
        torch.testing.assert_close(found.o_bias, a.o_bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_fewer_tokens_than_dims_are_no_obstacle(biased: bool) -> None:
    a = record(biased=biased)
    read, target = reads(a, tokens=2)
    fit = OutputFit(a)
    fit.see(read, target)
    assert squared_error(fit.record(), read, target) < squared_error(a, read, target)


@pytest.mark.parametrize("biased", [False, True])
def test_heads_that_read_nothing_leave_the_output_as_it_is(biased: bool) -> None:
    """Values of zeros: the matrix stays, and the bias takes what is missing."""
    a = record(biased=biased)
    read, target = reads(a)
    fit = OutputFit(a)
    fit.see(torch.zeros_like(read), target)
    found = fit.record()
    torch.testing.assert_close(found.o, a.o)
    if biased:
        assert found.o_bias is not None
        torch.testing.assert_close(found.o_bias, target.flatten(0, 1).mean(0), rtol=1e-4, atol=1e-5)
