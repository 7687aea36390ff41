"""The derivative of a QK-norm, against autograd's."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

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
