"""Records in another form: QK-norm in projections is the same function."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import factored, inputs, loss, record

from attention.rope import Pairing

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")


@pytest.mark.parametrize("norm", ["shared", "head", "all", "layer"])
@pytest.mark.parametrize(("groups", "biased"), [(1, True), (2, False), (4, True)])
def test_behind_norms_is_the_same_function(norm: str, groups: int, biased: bool) -> None:
    a = record(groups, 4 // groups, nope=2, biased=biased, norm=norm)
    found = a.on_projected_inputs()
    assert found.q_norm is found.k_norm is None
    assert loss(a, found) < 1e-6
    assert found.on_projected_inputs() is found
    assert (plain := record()).on_projected_inputs() is plain


@pytest.mark.parametrize("norm", [None, "head", "all"])
def test_behind_a_clamp_every_number_is_clamped(norm: str | None) -> None:
    a, x = record(norm=norm, nope=2), inputs(20)
    assert loss(a, a.on_projected_inputs(1e6)) < 1e-6, "nothing is so large"
    found = a.on_projected_inputs(0.4)
    whole, clamped = (b.projections(x) for b in (a.on_projected_inputs(1e6), found))
    for free, held in zip(whole, clamped, strict=True):
        torch.testing.assert_close(held, free.clamp(-0.4, 0.4))
        assert (free.abs() > 0.4).any(-1).any(-2).all(), "queries of each head, and keys and values"
    assert loss(a, found) > 1e-2
    assert found.on_projected_inputs(0.1) is found


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 3), share=st.integers(1, 3), pairs=st.integers(1, 4), nope=st.integers(0, 3), biased=st.booleans(),
    seed=st.integers(0, 99), first=st.sampled_from(PAIRINGS), then=st.sampled_from(PAIRINGS),
)  # fmt: skip
def test_another_order_of_pairs_is_the_same_function(
    groups: int, share: int, pairs: int, nope: int, biased: bool, seed: int, first: Pairing, then: Pairing
) -> None:
    whole = record(groups, share, pairs, nope, pairing=first, biased=biased, seed=seed)
    latent = factored(groups * share, 6, pairs, 7, 20, biased, seed, first)
    for a in (whole, latent):
        found = a.paired(then)
        assert found.rotary.pairing == then
        assert loss(a, found) < 1e-12
        back = found.paired(first)
        assert all(torch.equal(value, getattr(back, name)) for name, value in vars(a).items() if torch.is_tensor(value))
    assert record(pairs=0, nope=3).paired("interleaved").rotary is None
    if first != then and pairs > 1:
        assert not torch.equal(whole.paired(then).k, whole.k)
