"""Values fitted to what comes out: what is restored, and that the gradient is one."""

import dataclasses

import pytest
import torch
from records import block_of, blocks_of, random, record, run
from refitting import SEEN, X, changed, merged

from attention.forward import output_error
from attention.record import Attention
from convert.calibration import values
from convert.calibration.least_squares import fitted_spans
from convert.calibration.refit import _Search
from convert.calibration.values import fitted_values


def with_fitted_values(before: Attention, after: Attention) -> Attention:
    return _Search(before, blocks_of(X)).closer(after, fitted_values(before, after, blocks_of(X), SEEN.read))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_values_that_were_spoilt_are_restored(biased: bool, groups: int) -> None:
    a = record(groups, 4 // groups, 3, 2, 20, biased=biased)
    spoilt = dataclasses.replace(a, v=a.v + 0.3 * random(*a.v.shape, seed=5) * a.v.std())
    fitted = with_fitted_values(a, spoilt)
    assert output_error(a, spoilt, blocks_of(X)) > 1e-2
    assert output_error(a, fitted, blocks_of(X)) < 0.1 * output_error(a, spoilt, blocks_of(X))
    assert changed(fitted, spoilt) == {"v"}


@pytest.mark.usefixtures("in_full")
@pytest.mark.parametrize("sinks", [False, True])
def test_the_gradient_by_values_is_that_of_the_squared_error(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.calibration.least_squares.SPAN", 7)
    a = record(4, 2, 2, 2, 20, sinks=sinks)
    after = merged(a, 2)
    leaf = (0.1 * random(*after.v.shape, seed=5)).requires_grad_(True)
    x, expected_outputs = X[:1], run(a, X[:1])
    lacking = expected_outputs - run(dataclasses.replace(after, v=after.v + leaf), x)
    (expected,) = torch.autograd.grad(0.5 * lacking.square().sum(), leaf)
    parts = fitted_spans(8, 1, X.shape[1])[0]
    fit = values._ValueFit.of(after, block_of(x[0]), (expected_outputs - run(after, x))[0].float(), parts)
    assert sum(tokens.stop - tokens.start for tokens in fit.spans) == X.shape[1]
    found = fit.curvature(leaf.detach()) - fit.wanted
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_a_fit_brings_the_outputs_that_it_sees_closer() -> None:
    """All groups together: each by itself, they would compensate for the same loss again and again."""
    a = record(4, 1, 3, 0, 20, norm="all")
    after = merged(a, 2)
    assert output_error(a, fitted_values(a, after, blocks_of(X), SEEN.read)(1.0), blocks_of(X)) < 0.9 * output_error(
        a, after, blocks_of(X)
    )
