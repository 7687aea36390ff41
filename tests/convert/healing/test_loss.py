"""The loss in chunks: the value and its gradients."""

from __future__ import annotations

import pytest
import torch

from convert.healing import loss as module
from convert.healing.loss import chunks, distance, distances, measured

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
        lambda chunk: teacher[chunk],
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
        return distance(h, lambda x: x @ weight.T, lambda chunk: teacher[chunk], targets, VOCABULARY, 0.3, [])

    assert torch.autograd.gradcheck(loss, (hidden,))


def test_a_model_is_at_no_distance_from_itself() -> None:
    same = logits(0).log_softmax(-1)
    assert float(distances(same, same).abs().max()) < 1e-12


def test_tokens_are_measured_in_both_models() -> None:
    teacher, student, targets = logits(0), logits(1), torch.arange(7)
    found = measured(student, lambda h: h, lambda chunk: teacher[chunk], targets, VOCABULARY)
    assert float(found[:, 0].sum()) == pytest.approx(float(whole(student, teacher)))
    for losses, model in ((found[:, 1], student), (found[:, 2], teacher)):
        expected = torch.nn.functional.cross_entropy(model, targets, reduction="none").double()
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)
