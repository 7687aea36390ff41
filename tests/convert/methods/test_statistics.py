"""What is known of a layer's input: moments, what a norm's gains say without text, and how far few tokens are trusted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import inputs, measured, measured_behind, random, record

from convert.methods.blocks import Blocks
from convert.methods.statistics import EXCERPT, Statistics, shrinkage


def shrinkage_of(known: Statistics) -> float:
    return shrinkage(known.covariance, known.tokens)


def test_without_text_the_gains_of_the_norm_are_all_there_is() -> None:
    gain, bias = random(6), random(6, seed=1)
    known = Statistics.assumed(6, gain, bias)
    assert known.tokens == 0
    assert known.sample is None
    assert known.second.dtype == known.mean.dtype == torch.float64
    torch.testing.assert_close(known.covariance, gain.double().square().diag())
    torch.testing.assert_close(known.mean, bias.double())
    torch.testing.assert_close(known.second, gain.double().square().diag() + torch.outer(bias, bias).double())
    drawn = torch.randn(200_000, 6, generator=torch.Generator().manual_seed(0)) * gain + bias
    torch.testing.assert_close((drawn.T @ drawn / len(drawn)).double(), known.second, rtol=0.05, atol=0.05)
    assert shrinkage_of(known) == 0
    torch.testing.assert_close(known.shrunk().second, known.second, rtol=1e-12, atol=1e-12)
    plain = Statistics.assumed(6)
    assert torch.equal(plain.second, torch.eye(6).double())
    assert not plain.mean.any()


def test_shrinkage_falls_with_tokens_to_nothing() -> None:
    shares = [shrinkage_of(measured(inputs(20, tokens=count, blocks=1))) for count in (8, 30, 100, 400, 1600, 100_000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.1
    assert shares[-1] < 0.01


@settings(max_examples=15, deadline=None)
@given(width=st.integers(2, 24), tokens=st.integers(2, 30), scale=st.sampled_from([1e-6, 1.0, 1e6]), seed=st.integers(0, 99))
def test_what_is_shrunk_is_positive_definite_with_the_same_variances(width: int, tokens: int, scale: float, seed: int) -> None:
    known = measured(inputs(width, tokens, seed, blocks=1) * scale)
    assert 0 < shrinkage_of(known) <= 1
    shrunk = known.shrunk()
    deviation = shrunk.covariance.diagonal().sqrt()
    correlation = shrunk.covariance / torch.outer(deviation, deviation)
    assert torch.linalg.eigvalsh(correlation).min() > 1e-6
    torch.testing.assert_close(shrunk.covariance.diagonal(), known.covariance.diagonal(), rtol=1e-6, atol=0)
    assert torch.equal(shrunk.mean, known.mean)
    assert shrunk.tokens == known.tokens
    assert shrunk.sample is known.sample


@pytest.mark.parametrize("what", ["zeros", "constant", "one token", "dead channels"])
def test_poor_inputs_have_finite_statistics(what: str) -> None:
    x = {
        "zeros": torch.zeros(1, 5, 4),
        "constant": torch.ones(1, 5, 4),
        "one token": random(1, 1, 4),
        "dead channels": random(1, 9, 4) * torch.tensor([1.0, 0, 1, 0]),
    }[what]
    known = measured(x)
    assert 0 <= shrinkage_of(known) <= 1
    assert torch.isfinite(known.shrunk().second).all()


@pytest.mark.parametrize(
    ("blocks", "context", "chosen"),
    [(3, 512, [0, 1, 2]), (8, 512, list(range(8))), (32, 512, [2, 6, 10, 14, 18, 22, 26, 30]), (4, 3000, [2]), (2, 9000, [1])],
)
def test_an_excerpt_is_a_few_blocks_from_all_over_a_sample(blocks: int, context: int, chosen: list[int]) -> None:
    sample = Blocks.whole(torch.arange(blocks)[:, None, None].expand(-1, context, 1))
    assert sample.spread(EXCERPT).rows[:, 0, 0].tolist() == chosen


@pytest.mark.parametrize("norm", ["shared", "head", "all", "layer"])
def test_without_text_normalised_keys_are_those_of_the_norms_gains(norm: str) -> None:
    """Drawn as assumed, up to what the norm of each token does: for wide heads it is nearly the same for all."""
    a, gain = record(1, 2, pairs=60, width=300, norm=norm, biased=norm == "layer"), random(300).abs() + 0.5
    projections = a.on_projected_inputs().projections
    known = Statistics.assumed(300, gain).behind(projections)
    drawn = measured_behind(projections, random(1, 4000, 300, seed=3) * gain)
    for found, expected in (
        (known.second, drawn.second), (known.mean, drawn.mean), (known.queries, drawn.queries),
    ):  # fmt: skip
        assert float((found - expected).norm() / expected.norm().clamp_min(5)) < 0.25
    assert (known.tokens, known.sample) == (0, None)
    torch.testing.assert_close(known.queries[:, -1, -1], torch.ones(2).double())


@pytest.mark.parametrize("clip", [0.3, 1.0, 20.0])
def test_without_text_clamped_keys_are_those_of_normal_numbers(clip: float) -> None:
    """What a clamp takes away is what it takes of a normal number that correlates with others."""
    projections = record(1, 2, pairs=10, width=40, biased=False).on_projected_inputs(clip).projections
    known, x = Statistics.assumed(40), random(1, 4000, 40, seed=3)
    found, drawn = known.behind(projections), measured_behind(projections, x).second
    rows = torch.cat((projections.source.k, projections.source.v)).flatten(0, 1).double()
    correlated = projections(x)[1][0].double().T @ (x[0].double() @ rows.T) / 4000  # E[clamp(y) yᵀ] = s E[y yᵀ]
    kept = (found.second.diagonal() / (rows @ rows.T).diagonal()).sqrt()
    expected = kept[:, None] * (rows @ rows.T)
    assert float((correlated - expected).norm() / expected.norm()) < 0.1
    assert float((drawn.diagonal() - found.second.diagonal()).abs().max()) < 0.4 * float(drawn.diagonal().max())
