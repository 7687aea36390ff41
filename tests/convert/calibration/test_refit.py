"""Queries, keys and values by turns: what must not get worse, and what stays as it is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from records import block_of, blocks_of, inputs, loss, measured, random, record, run
from refitting import SEEN, X, any_refit, changed, fit_of, latent, merged, refitted_queries

from attention.forward import heads_of, output_error
from attention.record import Attention, Record
from attention.rope import Pairing
from convert.calibration import keys, refit, values
from convert.calibration.least_squares import fitted_spans
from convert.calibration.refit import refitted, sample_for
from convert.methods.blocks import Blocks


def all_refitted(before: Attention, after: Record) -> Record:
    return refitted(before, after, Blocks.whole(X), SEEN)


@settings(max_examples=5, deadline=None)
@any_refit
def test_a_refit_never_does_worse_on_blocks_that_it_was_not_fitted_on(
    share: int, pairs: int, nope: int, biased: bool, pairing: str, method: str, factor: float, seed: int
) -> None:
    a = record(4, share, pairs, nope, 20, pairing, biased, factor, seed)  # type: ignore[arg-type]
    after: Record = merged(a, 2, method) if method in ("aligned", "mean") else latent(a, 6, (0,), method)
    fitted, others = all_refitted(a, after), X[Blocks.whole(X).parted()[1]]
    assert output_error(a, fitted, blocks_of(others)) <= output_error(a, after, blocks_of(others))


def test_a_refit_does_much_better_than_queries_alone_where_there_is_something_to_gain() -> None:
    x, other = inputs(20, tokens=64, blocks=24), inputs(20, tokens=64, blocks=4, seed=7)
    a = record(4, 1, 3, 2, 20)
    after = merged(a, 1, "mean")
    fitted, alone = refitted(a, after, Blocks.whole(x), measured(x).attended), refitted_queries(a, after, x)
    assert output_error(a, fitted, blocks_of(other)) < 0.9 * output_error(a, alone, blocks_of(other))


@pytest.mark.parametrize(("biased", "pairing"), [(False, "half"), (True, "interleaved")])
def test_what_is_exact_stays_exact_in_a_refit(biased: bool, pairing: Pairing) -> None:
    a = record(2, 2, 3, 3, 20, pairing, biased)
    whole = latent(a, min(20, 2 * 2 * 9 - 12), (0, 0, 1, 1, 2, 2))
    names = [name for name in ("k", "v", "k_bias", "v_bias") if getattr(a, name) is not None]
    twice = dataclasses.replace(a, **{name: getattr(a, name).repeat_interleave(2, 0) for name in names})
    for before, after in ((a, whole), (a, a), (twice, merged(twice, 2))):
        assert loss(before, all_refitted(before, after), X) < 1e-5


@pytest.mark.parametrize(
    "kind", [*({"norm": norm} for norm in ("head", "layer", "after")), {"sinks": True, "nope": 2}], ids=str
)
def test_all_but_sinks_is_fitted_also_through_a_norm(kind: dict[str, Any]) -> None:
    x, other = inputs(20, tokens=64, blocks=8), inputs(20, tokens=64, blocks=4, seed=7)
    a = record(4, 1, 3, **kind)
    after = merged(a, 2)
    fitted = refitted(a, after, Blocks.whole(x), measured(x).attended)
    assert changed(fitted, after) == {"q", "q_bias", "k", "v", *(["k_norm"] if "norm" in kind else [])}
    values_alone = dataclasses.replace(after, v=fitted.v)
    assert output_error(a, fitted, blocks_of(other)) < 0.9 * output_error(a, values_alone, blocks_of(other))
    assert loss(a, all_refitted(a, a), X) < 1e-5


@pytest.mark.parametrize("part", [keys, values])
def test_sums_of_many_rounded_products_are_not_rounded(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 600 spans; summed in bfloat16, these are off by 3 to 9 %."""
    monkeypatch.setattr("convert.calibration.least_squares.SPAN", 1)
    a, x, lacking = record(4, 1, 2, 0, 20), random(600, 20, seed=3), random(600, 20, seed=7)
    after, spans, found, source = merged(a, 2), fitted_spans(4, 1, 600)[0], [], heads_of(a, block_of(x))
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(part, "rough", lambda device, dtype=dtype: dtype)
        fit: Any = fit_of(source, after, x) if part is keys else values._ValueFit.of(after, block_of(x), lacking, spans)
        found.append((fit.wanted, fit.curvature(0.1 * random(*after.k.shape, seed=5))))
    for exact, rounded in zip(*found, strict=True):
        assert float((rounded - exact).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("what", ["q", "k", "v", "o"])
def test_a_refit_of_heads_of_zeros_stays_finite(what: str) -> None:
    a = record(4, 1, 3, 2, 20)
    tensor = getattr(a, what).clone()
    (tensor[:, :2] if what == "o" else tensor[:2]).zero_()
    a = dataclasses.replace(a, **{what: tensor})
    for after in (merged(a, 2), latent(a, 6, (0, 1))):
        assert torch.isfinite(run(all_refitted(a, after), X)).all()


def test_a_layer_of_zeros_is_left_as_it_is() -> None:
    a = record(4, 1, 3, 2, 20, biased=False)
    a = dataclasses.replace(a, q=torch.zeros_like(a.q), v=torch.zeros_like(a.v))
    after = merged(a, 2)
    assert all_refitted(a, after) is after


@pytest.mark.parametrize(
    ("heads", "blocks", "context", "tokens", "count"),
    [
        (9, 32, 512, None, 4),
        (9, 32, 512, 8192, 2),
        (32, 8, 2048, None, 4),
        (1, 1, 8192, 8192, 64),
        (64, 4, 64, 8192, 1),
        (10**6, 32, 512, None, 1),
    ],
)
def test_spans_that_are_fitted_are_bounded_and_there_is_one_at_least(
    heads: int, blocks: int, context: int, tokens: int | None, count: int
) -> None:
    parts = fitted_spans(heads, blocks, context, tokens)
    assert [len(part) for part in parts] == [count] * blocks
    assert (parts[0] != parts[1]) if (count, heads) == (2, 9) else True, "of every block other ones"
    assert all(span.start < context for part in parts for span in part)


@pytest.mark.parametrize(("width", "tokens"), [(64, 16384), (2048, 16384), (4096, 8192), (8192, 4096), (16384, 4096)])
def test_wide_models_are_refitted_on_fewer_tokens(width: int, tokens: int) -> None:
    assert sample_for(width) == tokens


def test_a_single_block_is_enough_for_queries_alone() -> None:
    a = record(4, 1, 3, 2, 20)
    after = merged(a, 2, "mean")
    assert changed(refitted(a, after, Blocks.whole(X[:1]), SEEN), after) == {"q", "q_bias"}


def test_keys_are_weighed_as_attention_sees_tokens_and_values_as_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    def noting(name: str, fit: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            given[name] = args[3]
            return fit(*args)

        return noted

    for name in ("fitted_keys", "fitted_values"):
        monkeypatch.setattr(refit, name, noting(name, getattr(refit, name)))
    a = record(4, 1, 3, 2, 20)
    refitted(a, merged(a, 2), Blocks.whole(X), SEEN)
    assert torch.equal(given["fitted_keys"].seen, SEEN.seen)
    assert torch.equal(given["fitted_values"], SEEN.read)
    assert not torch.allclose(SEEN.seen, SEEN.read)
