"""The loss of healing: KL(teacher ‖ student) of each token's prediction, at temperature 1, in fp32.

It is computed for a few tokens at a time, together with its gradient, so that logits never exist for all tokens. The backward
pass then only scales that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import nll_loss

VALUES_AT_ONCE = 2**23  # logits at a time

# A chunk of tokens → the teacher's logits, `[n, vocabulary]`, fp32.
Expected = Callable[[slice], torch.Tensor]
# Hidden states `[n, E]` → logits `[n, vocabulary]`, fp32.
Head = Callable[[torch.Tensor], torch.Tensor]


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Chunks of tokens whose logits are few enough to exist at once."""
    rows = max(1, VALUES_AT_ONCE // vocabulary)
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def distances(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """`[n]`, KL(expected ‖ found) of each token, from log-probabilities `[n, vocabulary]`."""
    return (expected.exp() * (expected - found)).sum(-1)


def distance(
    hidden: torch.Tensor,
    head: Head,
    expected: Expected,
    targets: torch.Tensor,
    vocabulary: int,
    ce: float,
    parameters: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The summed loss of N tokens: Σ KL + `ce` · Σ cross-entropy. Differentiable in `hidden` and `parameters`.

    Args:
        hidden: The student's hidden states, `[N, E]`.
        head: Makes its logits.
        expected: Makes the teacher's.
        targets: `[N]`, the tokens that follow.
        vocabulary: How many tokens there are.
        ce: The weight of the cross-entropy.
        parameters: Those of the head that train.
    """
    found: torch.Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden, head, expected, targets, vocabulary, ce, *parameters
    )
    return found


class _Chunked(torch.autograd.Function):
    """Computes the loss and its gradient chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: Head,
        expected: Expected,
        targets: torch.Tensor,
        vocabulary: int,
        ce: float,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        slopes = torch.empty_like(hidden)
        of_parameters = [torch.zeros_like(parameter) for parameter in parameters]
        for chunk in chunks(len(hidden), vocabulary):
            with torch.no_grad():
                teacher = expected(chunk).log_softmax(-1)
            with torch.enable_grad():
                states = hidden[chunk].detach().requires_grad_(True)
                found = head(states).log_softmax(-1)
                loss = distances(teacher, found).sum()
                if ce:
                    loss = loss + ce * nll_loss(found, targets[chunk], reduction="sum")
                slopes[chunk], *others = torch.autograd.grad(loss, [states, *parameters])
            for sum_, other in zip(of_parameters, others, strict=True):
                sum_ += other
            total += loss.detach().double()
        ctx.save_for_backward(slopes, *of_parameters)
        return total.to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *outward: torch.Tensor) -> Any:
        (scale,) = outward
        slopes, *of_parameters = ctx.saved_tensors
        return slopes * scale, None, None, None, None, None, *(found * scale for found in of_parameters)


def measured(hidden: torch.Tensor, head: Head, expected: Expected, targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """`[N, 3]`, fp64: each token's KL to the teacher, the student's loss and the teacher's. Arguments as of `distance`."""
    parts = []
    with torch.no_grad():
        for chunk in chunks(len(hidden), vocabulary):
            teacher, found = expected(chunk).log_softmax(-1), head(hidden[chunk]).log_softmax(-1)
            losses = (nll_loss(one, targets[chunk], reduction="none") for one in (found, teacher))
            parts.append(torch.stack((distances(teacher, found), *losses), 1).double())
    return torch.cat(parts)
