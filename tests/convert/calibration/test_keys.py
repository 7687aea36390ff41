"""Keys fitted to the queries that meet them: what is restored, and that the gradient is one."""

import dataclasses

import pytest
import torch
from records import block_of, blocks_of, random, record
from refitting import SEEN, WEIGHTS, X, changed, fit_of, latent, merged, met, sources

from attention.forward import Heads, heads_of, output_error
from attention.record import Attention, FactoredAttention, Record
from attention.rope import Pairing
from convert.calibration import keys
from convert.calibration.keys import fitted_gains, fitted_keys
from convert.calibration.refit import _Search


def with_fitted_keys(before: Attention, after: Record) -> Record:
    return _Search(before, blocks_of(X)).closer(after, fitted_keys(after, blocks_of(X), sources(before, X), SEEN))


@pytest.mark.parametrize(
    ("a", "name"),
    [(record(1, 4, 3, 0, 20, "interleaved"), "k"), (record(2, 2, 3, 3, 20), "k"), (record(2, 2, 3, 2, 20), "k_rope")],
    ids=["gqa", "gqa, partial", "mla"],
)
def test_keys_that_were_spoilt_are_restored(a: Attention, name: str) -> None:
    whole: Record = latent(a, 20, (0, 0, 1, 1, 2, 2)) if name == "k_rope" else a
    kept = getattr(whole, name)
    spoilt = dataclasses.replace(whole, **{name: kept + 0.3 * random(*kept.shape, seed=5) * kept.std()})
    fitted = with_fitted_keys(a, spoilt)
    assert output_error(a, spoilt, blocks_of(X)) > 1e-3
    assert output_error(a, fitted, blocks_of(X)) < 0.2 * output_error(a, spoilt, blocks_of(X))
    assert changed(fitted, spoilt) == {name}


def squared_error(source: Heads, result: Heads, start: Heads) -> torch.Tensor:
    """½ Σ_h w_h Σ_t Var_{s ~ p_t} of what is missing of the logits, spelled out for one head after another.

    A sink takes part as a token whose logit is exact: a constant that is added to all others is no constant. `start` is the
    result before its change. Heads over a latent count alike.
    """
    total, weights = torch.zeros(1, 1), WEIGHTS if result.lift is None else torch.ones_like(WEIGHTS)
    for head in range(len(source.plain)):
        p, missing = met(source, start, head), (result.logits(head) - source.logits(head)).tril()
        total = total + 0.5 * weights[head] * ((p * missing.square()).sum(-1) - (p * missing).sum(-1).square()).sum()
    return total.sum()


@pytest.mark.parametrize("case", ["gqa", "gqa, interleaved, partial", "gqa, ALiBi", "gqa, sinks", "mla", "mla, ALiBi", "mqa"])
@pytest.mark.usefixtures("in_full")
def test_the_gradient_by_keys_is_that_of_the_squared_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.calibration.least_squares.SPAN", 7)
    pairing: Pairing = "interleaved" if "inter" in case else "half"
    nope = 2 if "partial" in case else 0
    a = record(4, 1, 2, nope, 20, pairing, biased=False, alibi="ALiBi" in case, sinks="sinks" in case)
    after: Record = latent(a, 5, (0, 1)) if "mla" in case else merged(a, 1 if case == "mqa" else 2)
    kept = after.k_rope[None] if isinstance(after, FactoredAttention) else after.k
    leaf = (0.1 * random(*kept.shape, seed=5)).requires_grad_(True)
    rows = kept.float() + leaf
    moved = {"k_rope": rows[0]} if isinstance(after, FactoredAttention) else {"k": rows}
    source = heads_of(a, block_of(X[0]))
    (expected,) = torch.autograd.grad(
        squared_error(source, heads_of(dataclasses.replace(after, **moved), block_of(X[0])), heads_of(after, block_of(X[0]))),
        leaf,
    )
    fit = fit_of(source, after, X[0])
    found = fit.curvature(leaf.detach()) - fit.wanted
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("norm", ["shared", "head", "layer", "after"])
@pytest.mark.usefixtures("in_full")
def test_behind_a_norm_keys_and_gains_descend_the_squared_error(norm: str) -> None:
    a, x = record(4, 1, 2, 2, 20, norm=norm), X[0]
    after = merged(a, 2)
    rows, gain = after.k.clone().requires_grad_(True), after.k_norm.gain.clone().requires_grad_(True)
    moved = dataclasses.replace(after, k=rows, k_norm=dataclasses.replace(after.k_norm, gain=gain))
    source = heads_of(a, block_of(x))
    by_rows, by_gain = torch.autograd.grad(
        squared_error(source, heads_of(moved, block_of(x)), heads_of(after, block_of(x))), (rows, gain)
    )
    for kind, expected in ((keys._KeyFit, by_rows), (keys._GainFit, by_gain[..., None])):
        found = -fit_of(source, after, x, kind).wanted
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("norm", ["shared", "head", "all", "layer", "after"])
def test_behind_a_norm_keys_and_gains_that_were_spoilt_are_restored(norm: str) -> None:
    a = record(2, 2, 3, 2, 20, norm=norm)
    spoilt = dataclasses.replace(a, k=a.k + 0.1 * random(*a.k.shape, seed=5) * a.k.std())
    fitted = with_fitted_keys(a, with_fitted_keys(a, spoilt))  # steps of Gauss and Newton
    assert output_error(a, spoilt, blocks_of(X)) > 1e-4
    assert output_error(a, fitted, blocks_of(X)) < 0.3 * output_error(a, spoilt, blocks_of(X))
    dull = dataclasses.replace(a, k_norm=dataclasses.replace(a.k_norm, gain=0.8 * a.k_norm.gain))
    restored = _Search(a, blocks_of(X)).closer(dull, fitted_gains(dull, blocks_of(X), sources(a, X), SEEN))
    assert output_error(a, restored, blocks_of(X)) < 0.05 * output_error(a, dull, blocks_of(X))


@pytest.mark.usefixtures("in_full")
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_both_dims_of_a_rotary_pair_count_alike(pairing: str) -> None:
    a = record(2, 2, 3, 2, 20, pairing)  # type: ignore[arg-type]
    fit = fit_of(heads_of(a, block_of(X[0])), a, X[0])
    queries_ = heads_of(a, block_of(X[0])).rope.square().mul(WEIGHTS).sum(1).unflatten(0, (2, 2)).sum(1) * a.scale**2
    first, second = queries_.unflatten(1, (2, 3) if pairing == "half" else (3, 2)).unbind(1 if pairing == "half" else 2)
    power = fit.power()[:, :6].unflatten(1, (2, 3) if pairing == "half" else (3, 2))
    for half in power.unbind(1 if pairing == "half" else 2):
        torch.testing.assert_close(half, (first + second) / 2)
