"""The loss in chunks: its value and its gradients; decoders and heads, apart, give the logits that they give together."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import VOCABULARY as WORDS
from tiny import tiny_config, tiny_model
from tiny_mla import tokens

from attention import load
from attention.encoded_forward import rounding_cache, store_encoded
from attention.formats import FORMATS
from attention.spec import AttentionSpec
from convert.families import FAMILIES
from convert.healing.loss import Distillation, distance, hidden_states, logits_of, measured

VOCABULARY = 11
ROWS = 3  # at a time, of seven


def logits(seed: int, tokens: int = 7) -> torch.Tensor:
    return 3 * torch.randn(tokens, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """KL(expected ‖ found) by torch's own function, summed."""
    return torch.nn.functional.kl_div(found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="none").sum()


def test_value_and_gradients_are_those_of_all_logits_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = logits(1)
    found = distance(hidden, lambda h: h @ weight.T, lambda chunk: teacher[chunk], ROWS, [weight])
    (2 * found).backward()
    slopes = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    expected = whole(hidden @ weight.T, teacher)
    (2 * expected).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(slopes, (hidden.grad, weight.grad))


def test_tokens_are_measured_in_both_models() -> None:
    teacher, student, targets = logits(0), logits(1), torch.arange(7)
    found = measured(student, lambda h: h, lambda chunk: teacher[chunk], targets, ROWS)
    assert float(found[:, 0].sum()) == pytest.approx(float(whole(student, teacher)))
    for losses, model in ((found[:, 1], student), (found[:, 2], teacher)):
        expected = torch.nn.functional.cross_entropy(model, targets, reduction="none").double()
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_parts_are_the_whole(model_type: str) -> None:
    model = tiny_model(tiny_config(model_type)).eval()
    ids = tokens(2, 16)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = logits_of(model, hidden_states(model, ids).flatten(0, 1))
    torch.testing.assert_close(parts, whole.flatten(0, 1).float(), rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(model.get_decoder())


def test_a_result_in_a_class_of_our_own(results: Callable[[str], Path]) -> None:
    model = load(results("gpt2 mla"), dtype=torch.float32).eval()
    ids = tokens(2, 16)
    with torch.no_grad():
        parts = logits_of(model, hidden_states(model, ids).flatten(0, 1))
        torch.testing.assert_close(parts, model(ids, use_cache=False).logits.flatten(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("model_type", "tied"), [("llama", False), ("llama", True), ("gemma2", True)])
def test_gradients_of_all_weights_are_those_of_plain_logits(model_type: str, tied: bool) -> None:
    """Also through a head that caps its logits."""
    config = tiny_config(model_type, tie_word_embeddings=tied)
    student, teacher = tiny_model(config, 1), tiny_model(config, 2).requires_grad_(False)
    ids = tokens(4, 16, seed=2)
    Distillation(student, teacher, WORDS)(ids).backward()
    found = {name: p.grad for name, p in student.named_parameters()}
    student.zero_grad()
    logits = student(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    expected = teacher(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    (expected.exp() * (expected - logits)).sum().backward()
    for name, parameter in student.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-4 * largest, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_the_students_cache_is_read_rounded(form: str) -> None:
    config = tiny_config("llama")
    student, teacher = tiny_model(config, 1), tiny_model(config, 2).requires_grad_(False)
    ids, spec = tokens(4, 16, seed=2), AttentionSpec.from_config(config)
    through = Distillation(student, teacher, WORDS, partial(rounding_cache, FORMATS[form], spec))
    found = through(ids, measures=True)[:, 0]
    expected = teacher(ids).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        logits = store_encoded(student.eval(), form)(ids).logits[:, :-1].log_softmax(-1)
    distances = (expected.exp() * (expected - logits)).sum(-1).mean(1)
    torch.testing.assert_close(found.float(), distances, rtol=1e-5, atol=0)


def test_gradients_in_bfloat16_are_about_those_in_fp32() -> None:
    config = tiny_config("llama")
    ids, slopes = tokens(4, 16, seed=2), []
    for dtype in (torch.float32, torch.bfloat16):
        student, teacher = tiny_model(config, 1), tiny_model(config, 2).requires_grad_(False)
        Distillation(student, teacher, WORDS, dtype=dtype)(ids).backward()
        slopes.append(torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]))
    assert slopes[1].dtype is torch.float32
    assert not torch.equal(*slopes), "or it was not used"
    assert float((slopes[0] - slopes[1]).norm()) < 0.03 * float(slopes[0].norm())
