"""Queries through a latent: exact where the rank is full, and closer to the source than a plain SVD where it is not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import factored

from attention.forward import attention_output, output_error
from attention.record import FactoredAttention
from attention.reference import latent_attention
from convert.calibration.queries import met_by_queries
from convert.methods.query_latent import expected_met, truncated
from convert.methods.statistics import Attended, Statistics

HEADS, NOPE, PAIRS, WIDTH, TOKENS = 4, 6, 2, 24, 40


def latent(seed: int = 0, biased: bool = True, width: int = WIDTH) -> FactoredAttention:
    a = factored(HEADS, NOPE, PAIRS, 10, width, biased, seed)
    if not biased:
        return a
    return dataclasses.replace(a, q_nope_bias=a.q_nope[..., 0] * 2, q_rope_bias=a.q_rope[..., 0] * 2)


def inputs(seed: int = 0, width: int = WIDTH) -> torch.Tensor:
    """Blocks `[6, T, E]` of few directions and a mean."""
    generator = torch.Generator().manual_seed(seed)
    skew = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)
    return torch.randn(6, TOKENS, width, generator=generator) @ skew + torch.randn(width, generator=generator)


def statistics(x: torch.Tensor) -> Statistics:
    rows = x.flatten(0, 1).double()
    second, mean = rows.T @ rows / len(rows), rows.mean(0)
    return Statistics(second, mean, len(rows), Attended.assumed(second, mean))


def through(a: FactoredAttention, rank: int, x: torch.Tensor, measured: bool = True) -> FactoredAttention:
    known = statistics(x)
    met = met_by_queries(a.expanded(), a, list(x)) if measured else expected_met(a, known.attended)
    return truncated(a, rank, known.with_constant, met)


def by_plain_svd(a: FactoredAttention, rank: int) -> FactoredAttention:
    rows = torch.cat((a.q_nope, a.q_rope), 1)
    u, s, v = torch.linalg.svd(rows.flatten(0, 1), full_matrices=False)
    up = (u[:, :rank] * s[:rank]).unflatten(0, (HEADS, -1))
    return dataclasses.replace(a, q_down=v[:rank], q_nope=up[:, :NOPE], q_rope=up[:, NOPE:])


@settings(max_examples=25, deadline=None)
@given(
    width=st.sampled_from([12, 24, 48]), more=st.integers(0, 5), biased=st.booleans(), measured=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_full_rank_changes_nothing(width: int, more: int, biased: bool, measured: bool, seed: int) -> None:
    a, x = latent(seed, biased, width), inputs(seed, width)
    found = through(a, min(width, HEADS * (NOPE + 2 * PAIRS)) + more, x, measured)
    assert output_error(a, found, list(x)) < 1e-9


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_errors_fall_with_the_rank_and_are_less_than_those_of_a_plain_svd(seed: int, biased: bool, measured: bool) -> None:
    a, x = latent(seed, biased), inputs(seed)
    ranks = range(2, WIDTH + 1, 3)
    errors = [output_error(a, through(a, rank, x, measured), list(x)) for rank in ranks]
    plain = [output_error(a, by_plain_svd(a, rank), list(x)) for rank in ranks]
    assert all(more > less for more, less in itertools.pairwise(errors)), errors
    assert all(own < other / 2 for own, other in zip(errors, plain, strict=True)), (errors, plain)


def test_what_queries_meet_weighs_their_errors() -> None:
    """A head whose nope keys hardly differ leaves the channels to others."""
    a, x = latent(), torch.randn(6, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    quiet = dataclasses.replace(a, up_k=a.up_k * torch.tensor([1, 1, 1, 1e-2])[:, None, None])

    def off(record: FactoredAttention, heads: slice) -> float:
        """Of what the nope keys of `a` make of queries."""
        found = through(record, 16, x)
        assert found.q_down is not None
        moved = (found.q_nope @ found.q_down - a.q_nope) @ (x - x.mean((0, 1))).flatten(0, 1).T
        return float((a.up_k.mT @ moved)[heads].norm())

    assert off(quiet, slice(3, 4)) > 1.5 * off(a, slice(3, 4))
    assert off(quiet, slice(0, 3)) < off(a, slice(0, 3))


def test_the_record_computes_what_the_reference_does() -> None:
    a, x = latent(), inputs()
    found = through(a, 7, x)
    expected = latent_attention(x, found).flatten(0, 1)
    torch.testing.assert_close(attention_output(found, list(x)), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(attention_output(found.expanded(), list(x)), expected, rtol=1e-4, atol=1e-4)


def test_channels_are_of_one_size() -> None:
    """They come through a norm whose constants are as large for all."""
    a, x = latent(), inputs()
    found = through(a, 7, x)
    assert found.q_down is not None
    sizes = (x.flatten(0, 1) @ found.q_down.T).square().mean(0).sqrt()
    torch.testing.assert_close(sizes, torch.ones(7), rtol=1e-3, atol=0)
