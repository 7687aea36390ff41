"""Queries fitted to what they meet: what must not get worse, what is restored, and that the gradient is one."""

import dataclasses

import pytest
import torch
from records import block_of, blocks_of, random, record
from refitting import X, changed, latent, merged, met, refitted_queries

from attention.forward import Jacobian, heads_of, output_error
from attention.record import Attention, Record
from attention.rope import Pairing
from convert.calibration import queries
from convert.calibration.least_squares import TOKENS, fitted_spans
from convert.calibration.queries import _together


def perturbed_heads(count: int, dim: int, seed: int = 3) -> torch.Tensor:
    """`[heads, D, D]` near the identity."""
    return torch.eye(dim) + 0.3 * random(count, dim, dim, seed=seed) * dim**-0.5


@pytest.mark.parametrize(("biased", "nope", "pairing"), [(False, 0, "half"), (True, 3, "interleaved")])
def test_queries_of_gqa_that_were_spoilt_are_restored(biased: bool, nope: int, pairing: str) -> None:
    a = record(2, 2, 3, nope, 20, pairing, biased)  # type: ignore[arg-type]
    maps = perturbed_heads(4, 6 + nope)
    bias = None if a.q_bias is None else (maps @ a.q_bias[..., None])[..., 0]
    spoilt = dataclasses.replace(a, q=maps @ a.q, q_bias=bias)
    fitted = refitted_queries(a, spoilt, X)
    assert output_error(a, spoilt, blocks_of(X)) > 1e-3
    assert output_error(a, fitted, blocks_of(X)) < 0.05 * output_error(a, spoilt, blocks_of(X))
    assert changed(fitted, spoilt) == ({"q", "q_bias"} if biased else {"q"})


def fits_of(a: Attention, after: Record, heads: slice) -> list[queries._QueryFit]:
    parts = fitted_spans(heads.stop - heads.start, len(X), X.shape[1], TOKENS)
    return [fit_of(a, after, x, heads, part) for x, part in zip(X, parts, strict=True)]


def fit_of(a: Attention, after: Record, x: torch.Tensor, heads: slice, part: list[slice]) -> queries._QueryFit:
    source, result = heads_of(a, block_of(x)), heads_of(after, block_of(x))
    jacobian = Jacobian.of_queries(after, result).part(heads)
    return queries._QueryFit.of(source.part(heads), result.part(heads), jacobian, part)


CASES = ("gqa", "gqa, interleaved, partial", "gqa, ALiBi", "mla", "mla, ALiBi", "mqa")


@pytest.mark.parametrize("case", [*CASES, "gqa, sinks", "mla, a latent as wide as heads"])
def test_the_gradient_is_that_of_the_squared_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """½ Σ_t Var_{s ~ p_t} of what is missing of the logits, spelled out for one token after another."""
    monkeypatch.setattr("convert.calibration.least_squares.SPAN", 7)  # blocks are not a multiple of it
    pairing: Pairing = "interleaved" if "inter" in case else "half"
    a = record(4, 1, 2, 2 if "partial" in case else 0, 20, pairing, alibi="ALiBi" in case, sinks="sinks" in case)
    rank, groups = 4 if "wide" in case else 5, 1 if "mqa" in case else 2
    after: Record = latent(a, rank, (0, 1)) if "mla" in case else merged(a, groups)
    blocks, heads = [(heads_of(a, block_of(x)), heads_of(after, block_of(x))) for x in X], slice(1, 3)
    columns = sum(part.shape[-1] for part in blocks[0][1].kept(1))
    leaf = (0.1 * random(2, a.q.shape[1], columns, seed=5)).double().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for source, result in blocks:
        for head, maps in zip((1, 2), leaf, strict=True):
            query, attended = source.plain[head].double(), met(source, result, head).double()
            nope, rope = (part.double() for part in result.kept(head))
            missing = (source.logits(head) - result.logits(head)).double()
            for t in range(len(query)):
                moved, p = query[t] @ maps, attended[t, : t + 1]
                rotated = result.rotation(moved[nope.shape[1] :].expand(len(query), -1))[t]
                got = result.scale * (nope[: t + 1] @ moved[: nope.shape[1]] + rope[: t + 1] @ rotated)
                error = got - missing[t, : t + 1]
                total = total + 0.5 * ((p * error.square()).sum() - (p * error).sum().square())  # a sink's error is zero
    (expected,) = torch.autograd.grad(total, leaf)
    fits = fits_of(a, after, heads)
    assert fits[0].lifts == (case in ("mla", "mla, ALiBi"))
    found = torch.stack([fit.curvature(leaf.detach().float()) - fit.wanted for fit in fits]).sum(0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("norm", [None, "shared", "head", "layer", "after"])
def test_behind_a_norm_queries_descend_the_squared_error(norm: str | None) -> None:
    a, x = record(4, 1, 2, 2, 20, norm=norm), X[0]
    after, total = merged(a, 2), torch.zeros(())
    leaf = torch.zeros(4, a.q.shape[1], a.q.shape[1], requires_grad=True)
    source, result = heads_of(a, block_of(x)), heads_of(queries._applied(a, after, leaf), block_of(x))
    for head in range(4):
        p = met(source, result, head)
        lacking = result.logits(head) - source.logits(head)
        total = total + 0.5 * (p * (lacking - (p * lacking).sum(-1, keepdim=True)).square()).sum()
    (expected,) = torch.autograd.grad(total, leaf)
    found = -fit_of(a, after, x, slice(0, 4), fitted_spans(4, 1, len(x))[0]).wanted
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("case", ["gqa, partial", "mla", "attention factor"])
def test_the_moments_are_those_of_keys_as_queries_see_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated relative to the token, one token after another; what has a position and what has none, apart."""
    monkeypatch.setattr("convert.calibration.least_squares.SPAN", 7)
    a = record(4, 1, 2, 2, 20, "interleaved", True, 1.3 if case == "attention factor" else 1.0)
    after: Record = latent(a, 5, (0, 1)) if case == "mla" else merged(a, 2)
    x, head = X[0], 2
    source, result = heads_of(a, block_of(x)), heads_of(after, block_of(x))
    nope, rope = (result.scale * part.double() for part in result.kept(head))
    split, attended = nope.shape[1], met(source, result, head).double()
    expected = torch.zeros(split + rope.shape[1], split + rope.shape[1], dtype=torch.float64)
    for t, p in enumerate(attended):
        back = result.rotation.of(slice(t, t + 1)).adjoint(rope)
        for part, kept in ((slice(0, split), nope), (slice(split, None), back)):
            centred = kept - p @ kept
            expected[part, part] += (centred.T * p) @ centred
    of_queries, spread = fit_of(a, after, x, slice(1, 3), *fitted_spans(2, 1, len(x))).moments(10**6)
    torch.testing.assert_close(spread[1].double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(of_queries[1], source.plain[head].T @ source.plain[head], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_how_many_heads_are_fitted_together_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = record(4, 2, 3, 2, 20)
    after: Record = latent(a, 6, (0, 1)) if kind == "mla" else merged(a, 2)
    at_once = refitted_queries(a, after, X)
    monkeypatch.setattr("convert.calibration.queries._TOGETHER", 3 * 128 * 32)  # three heads of eight, and two at the end
    assert len(_together(8, 32)) == 3
    in_parts = refitted_queries(a, after, X)
    for name in ("q",) if isinstance(after, Attention) else ("up_k", "q_rope"):
        torch.testing.assert_close(getattr(in_parts, name), getattr(at_once, name), rtol=1e-3, atol=1e-4)
