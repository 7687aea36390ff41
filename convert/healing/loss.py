"""The loss of healing: KL(teacher ‖ student) of each token's prediction, at temperature 1, in fp32.

It is computed for a few tokens at a time, together with its gradient, so that logits never exist for all tokens. The backward
pass then only scales that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import nll_loss

VALUES_AT_ONCE = 2**23  # logits at a time
_LEAST = 1e-12  # of the mass that is left beside the largest probabilities


class Prediction(NamedTuple):
    """The teacher's predictions for n tokens.

    Attributes:
        values: Log-probabilities `[n, vocabulary]`, or the k largest of each, `[n, k]`; fp32.
        ids: `[n, k]`, int64: the tokens that these are of; None for all.
        losses: `[n]`: minus those of the tokens that follow, fp32.
    """

    values: torch.Tensor
    ids: torch.Tensor | None
    losses: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, targets: torch.Tensor, k: int | None = None) -> Prediction:
        """Of logits `[n, vocabulary]` and the tokens that follow, `[n]`; None for all, or the k largest."""
        full = logits.log_softmax(-1)
        losses = nll_loss(full, targets, reduction="none")
        return cls(full, None, losses) if k is None else cls(*full.topk(k, -1), losses)

    def distances(self, found: torch.Tensor) -> torch.Tensor:
        """`[n]`, the KL of each to log-probabilities `found [n, vocabulary]`.

        With the k largest, all other tokens count as one, which is never more than the KL itself.
        """
        if self.ids is None:
            return (self.values.exp() * (self.values - found)).sum(-1)
        mine, theirs = self.values.exp(), found.gather(-1, self.ids)
        rest = (1 - mine.sum(-1)).clamp_min(0)
        other = (1 - theirs.exp().sum(-1)).clamp_min(_LEAST)
        beside = torch.where(rest > _LEAST, rest * (rest.clamp_min(_LEAST).log() - other.log()), 0)
        return (mine * (self.values - theirs)).sum(-1) + beside


@dataclass
class Sums:
    """Sums over tokens, in nats: the KL to the teacher, and both models' losses on the text itself."""

    kl: float = 0.0
    student: float = 0.0
    teacher: float = 0.0
    tokens: int = 0

    @property
    def mean_kl(self) -> float:
        """The mean KL to the teacher."""
        return self.kl / self.tokens

    @property
    def mean_loss(self) -> float:
        """The mean loss over the teacher's."""
        return (self.student - self.teacher) / self.tokens

    def plus(self, other: Sums) -> Sums:
        """Of the tokens of both."""
        return Sums(self.kl + other.kl, self.student + other.student, self.teacher + other.teacher, self.tokens + other.tokens)


# A chunk of tokens → what the teacher says of these.
Expected = Callable[[slice], Prediction]
# Hidden states `[n, E]` → logits `[n, vocabulary]`, fp32.
Head = Callable[[torch.Tensor], torch.Tensor]


def chunks(tokens: int, vocabulary: int) -> list[slice]:
    """Chunks of tokens whose logits are few enough to exist at once."""
    rows = max(1, VALUES_AT_ONCE // vocabulary)
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


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
        expected: What the teacher says.
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
                teacher = expected(chunk)
            with torch.enable_grad():
                states = hidden[chunk].detach().requires_grad_(True)
                found = head(states).log_softmax(-1)
                loss = teacher.distances(found).sum()
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


def measured(hidden: torch.Tensor, head: Head, expected: Expected, targets: torch.Tensor, vocabulary: int) -> Sums:
    """Sums over N tokens, without gradients. Arguments as of `distance`."""
    sums = Sums(tokens=len(targets))
    with torch.no_grad():
        for chunk in chunks(len(hidden), vocabulary):
            teacher, found = expected(chunk), head(hidden[chunk]).log_softmax(-1)
            sums.kl += teacher.distances(found).double().sum().item()
            sums.student += nll_loss(found, targets[chunk], reduction="sum").item()
            sums.teacher += teacher.losses.double().sum().item()
    return sums
