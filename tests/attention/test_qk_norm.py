"""QK-norm against torch's norms, and its derivative against autograd's."""

from typing import Any, Literal

import pytest
import torch
from records import random
from torch.nn.functional import layer_norm, rms_norm

from attention.qk_norm import NormForm, QKNorm


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("scope", "heads"), [("head", 3), ("all", 1)])
def test_the_derivative_is_that_of_the_norm(kind: Literal["rms", "layer"], scope: Literal["head", "all"], heads: int) -> None:
    """Also of one over all heads, where there is but one head."""
    generator = torch.Generator().manual_seed(0)
    states, change, pull, gain = (torch.randn(heads, 5, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    norm = QKNorm(NormForm(kind, scope, True, False, 1e-6, 0.5), gain[:, 0])
    _, expected = torch.func.jvp(lambda x: norm(x[None])[0], (states,), (change,))
    derivative = norm.linearised(states)
    torch.testing.assert_close(derivative(change), expected)
    assert float((derivative(change) * pull).sum()) == pytest.approx(float((change * derivative.adjoint(pull)).sum()))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_are_those_of_torch(kind: Any, biased: bool, offset: float) -> None:
    """Of each head, with gains that heads share or of its own, and of all heads as one vector."""
    states, gain, bias = (random(*shape, seed=seed).double() for seed, shape in enumerate(((2, 4, 5, 6), (4, 6), (4, 6))))
    bias = bias if biased else None

    def torchs(x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        if kind == "layer":
            return layer_norm(x, weight.shape, weight + offset, added, 1e-3)
        return rms_norm(x, weight.shape, weight + offset, 1e-3) + (0 if added is None else added)

    for heads in (1, 4):
        rows = None if bias is None else bias[:heads]
        norm = QKNorm(NormForm(kind, "head", heads > 1, biased, 1e-3, offset), gain[:heads], rows)
        assert norm.per_head_gains == (heads > 1)
        for head, found in enumerate(norm(states).unbind(1)):
            expected = torchs(states[:, head], gain[head % heads], None if rows is None else rows[head % heads])
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    flat = torchs(states.transpose(1, 2).flatten(2), gain.flatten(), None if bias is None else bias.flatten())
    norm = QKNorm(NormForm(kind, "all", True, biased, 1e-3, offset), gain, bias)
    assert norm.per_head_gains
    torch.testing.assert_close(norm(states).transpose(1, 2).flatten(2), flat, rtol=1e-12, atol=1e-12)
