"""W_O fitted behind converted layers: ridge regression, and a ridge that keeps chance out."""

import dataclasses

import pytest
import torch
from records import factored, random, record

from attention.record import Record
from convert.calibration.outputs import _RIDGES, OutputFit


def reads(record_: Record, tokens: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = record_.o.shape[1] * record_.o.shape[2]
    read = random(3, tokens, width, seed=seed) @ (torch.eye(width) + 0.3 * random(width, width, seed=seed + 1)) + 0.5
    return read, random(3, tokens, record_.o.shape[0], seed=seed + 2)


def output(a: Record, read: torch.Tensor) -> torch.Tensor:
    return read @ a.o.flatten(1).T + (0 if a.o_bias is None else a.o_bias)


@pytest.mark.parametrize(
    ("kind", "biased", "weighted"), [(record, False, False), (factored, True, False), (record, True, True)]
)
def test_the_output_is_ridge_regression_of_what_is_missing(kind: type, biased: bool, weighted: bool) -> None:
    a: Record = kind(biased=biased)
    read, target = reads(a)
    fit, weights = OutputFit(a), random(*read.shape[:2], seed=5).square()
    for part in range(3):
        of = slice(part, part + 1)
        fit.see(read[of], target[of], weights[of] if weighted else None)
    found = fit.record()
    weight = weights.flatten()[:, None].double().sqrt() if weighted else torch.ones(weights.numel(), 1).double()
    x, missing = weight * read.flatten(0, 1), weight * (target - output(a, read)).flatten(0, 1)
    one = weight[:, : int(biased)]
    centred = x - one @ torch.linalg.lstsq(one, x).solution
    ridge = fit._ridge() * centred.square().sum(0).mean()
    # The ridge as rows of its own: one more equation for each coefficient, which wants it to be zero.
    wanting = torch.nn.functional.pad(ridge.sqrt() * torch.eye(x.shape[1]).double(), (0, int(biased)))
    rows, wanted = torch.cat((torch.cat((x, one), 1), wanting)), torch.nn.functional.pad(missing, (0, 0, 0, len(wanting)))
    solution = torch.linalg.lstsq(rows, wanted).solution
    change, bias = solution[: x.shape[1]].T, solution[x.shape[1] :].sum(0)
    torch.testing.assert_close(found.o.double(), a.o.double() + change.view(a.o.shape), rtol=1e-3, atol=1e-4)
    if biased:
        torch.testing.assert_close(found.o_bias.double(), a.o_bias.double() + bias, rtol=1e-3, atol=1e-4)
    else:
        assert found.o_bias is None
    changed = {f.name for f in dataclasses.fields(found) if getattr(found, f.name) is not getattr(a, f.name)}
    assert changed == ({"o", "o_bias"} if biased else {"o"})


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
        torch.testing.assert_close(found.o_bias, target.flatten(0, 1).mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("share", "ridge"), [(0.0, _RIDGES[-1]), (1.0, _RIDGES[0])], ids=["chance", "a large change"])
def test_the_ridge_is_the_one_that_holds_on_the_other_half(share: float, ridge: float) -> None:
    a = record()
    read, noise = reads(a, tokens=100)
    moved = output(a, read) + share * read @ random(read.shape[-1], a.o.shape[0], seed=9)
    fit = OutputFit(a)
    for part in range(3):
        fit.see(read[part : part + 1], (moved + 0.1 * noise)[part : part + 1])
    assert fit._ridge() == ridge


@pytest.mark.parametrize("biased", [False, True])
def test_the_error_on_a_half_is_that_of_its_tokens(biased: bool) -> None:
    a = record(biased=biased)
    read, target = reads(a)
    fit = OutputFit(a)
    for part in range(2):
        fit.see(read[part : part + 1], target[part : part + 1])
    one, other = fit._halves.values()
    change, bias = one.fitted(1e-2, biased)
    moved = dataclasses.replace(
        a,
        o=(a.o.double() + change.T.view(a.o.shape)).float(),
        o_bias=None if a.o_bias is None else (a.o_bias.double() + bias).float(),
    )
    expected = (output(moved, read[1:2]) - target[1:2]).square().sum()
    assert other.error(change, bias) == pytest.approx(float(expected), rel=1e-4)
