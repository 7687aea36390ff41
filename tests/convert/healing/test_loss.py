"""The loss in chunks: the value, its gradients, and what the largest probabilities leave."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.healing import loss as module
from convert.healing.loss import Prediction, chunks, distance, measured

VOCABULARY = 11


def logits(seed: int, tokens: int = 7) -> torch.Tensor:
    return 3 * torch.randn(tokens, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """KL(expected ‖ found) by torch's own function, summed."""
    return torch.nn.functional.kl_div(found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none").sum()


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VALUES_AT_ONCE", 3 * VOCABULARY)  # three tokens at a time


def test_spans_cover_all_tokens_once() -> None:
    assert chunks(7, VOCABULARY) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert chunks(2, 10**9) == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize("ce", [0.0, 0.5])
def test_value_and_gradients_are_those_of_all_logits_at_once(ce: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets, teacher = torch.arange(7), logits(1)
    found = distance(
        hidden,
        lambda h: h @ weight.T,
        lambda chunk: Prediction.of(teacher[chunk], targets[chunk]),
        targets,
        VOCABULARY,
        ce,
        [weight],
    )
    (2 * found).backward()
    slopes = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    expected = whole(hidden @ weight.T, teacher)
    expected = expected + ce * torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    (2 * expected).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slopes, (hidden.grad, weight.grad))


def test_gradients_are_those_of_finite_differences() -> None:
    weight, teacher = logits(2, 5).T.contiguous(), logits(1)
    hidden = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)

    def loss(h: torch.Tensor) -> torch.Tensor:
        targets = torch.arange(7)
        return distance(
            h, lambda x: x @ weight.T, lambda chunk: Prediction.of(teacher[chunk], targets[chunk]), targets, VOCABULARY, 0.3, []
        )

    assert torch.autograd.gradcheck(loss, (hidden,))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, VOCABULARY), st.integers(0, 100))
def test_the_largest_probabilities_give_at_most_the_kl(k: int, seed: int) -> None:
    teacher, student = logits(seed).log_softmax(-1), logits(seed + 1).log_softmax(-1)
    some, all_ = (Prediction.of(teacher, torch.arange(7), number).distances(student) for number in (k, None))
    assert bool((some <= all_ + 1e-9).all())
    assert bool((some >= -1e-9).all())
    if k >= VOCABULARY - 1:  # nothing is merged
        torch.testing.assert_close(some, all_, rtol=1e-6, atol=1e-9)


def test_a_model_is_at_no_distance_from_itself() -> None:
    same, targets = logits(0).log_softmax(-1), torch.arange(7)
    assert float(Prediction.of(same, targets).distances(same).abs().max()) < 1e-12
    assert float(Prediction.of(same, targets, 4).distances(same).abs().max()) < 1e-12


def test_sums_are_of_both_models() -> None:
    teacher, student, targets = logits(0), logits(1), torch.arange(7)
    sums = measured(student, lambda h: h, lambda chunk: Prediction.of(teacher[chunk], targets[chunk]), targets, VOCABULARY)
    assert sums.tokens == 7
    assert sums.kl == pytest.approx(float(whole(student, teacher)))
    for found, model in ((sums.student, student), (sums.teacher, teacher)):
        assert found == pytest.approx(float(torch.nn.functional.cross_entropy(model, targets, reduction="sum")))
    assert sums.plus(sums).tokens == 14
