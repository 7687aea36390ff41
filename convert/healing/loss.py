"""The loss of healing: KL(teacher ‖ student) of each token's prediction, at temperature 1, in fp32.

Logits of a long block over a large vocabulary take more memory than the model. So the decoder of a causal LM runs first, and
its hidden states become logits for a few tokens at a time; what a class does around its output embedding (scales, caps, casts)
stays its own. The gradient is computed together with the loss, and the backward pass only scales it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import nll_loss
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from attention.versions import CACHE
from convert.calibration.stream import positioned

_VALUES_AT_ONCE = 2**23  # logits

# A chunk of tokens → the teacher's logits, `[n, vocabulary]`, fp32.
Expected = Callable[[slice], torch.Tensor]
# Hidden states `[n, E]` → logits `[n, vocabulary]`, fp32.
Head = Callable[[torch.Tensor], torch.Tensor]


class Distillation(nn.Module):
    """The student, its teacher and the loss in one module, so that wrappers around it see every use of both.

    Args:
        student: A causal LM of transformers.
        teacher: The source, whose predictions it learns; without gradients.
        vocabulary: Of both.
        cache: Makes the student's cache of one pass, through whose rounding it trains; None for none.
        dtype: What products are computed in; weights are fp32.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        vocabulary: int,
        cache: Callable[[], Cache] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.student, self.teacher, self._cache = student, teacher, cache
        self._rows, self._dtype = max(1, _VALUES_AT_ONCE // vocabulary), dtype
        # The classes of layers, which FSDP reads: it shards layer by layer.
        self._no_split_modules = sorted({*(student._no_split_modules or ()), *(teacher._no_split_modules or ())})

    def train(self, mode: bool = True) -> Distillation:
        """Keep the modes of both models: nothing is dropped, and only layers to compute again are in training mode."""
        return self

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None, measures: bool = False) -> torch.Tensor:
        """The summed loss of the tokens that have a predecessor.

        Args:
            ids: `[B, T]`, blocks of text.
            positions: `[B, T]`, of their tokens; None if none skips.
            measures: Instead: `[B, 3]`, each block's mean KL, and the student's and the teacher's mean losses on its text.
        """
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._dtype is torch.bfloat16):
            with torch.no_grad():
                teachers = hidden_states(self.teacher, ids, positions)[:, :-1].flatten(0, 1)
            states = hidden_states(self.student, ids, positions, self._cache() if self._cache else None)[:, :-1].flatten(0, 1)
            both = states, partial(logits_of, self.student), lambda chunk: logits_of(self.teacher, teachers[chunk])
            if measures:
                return measured(*both, ids[:, 1:].flatten(), self._rows).unflatten(0, (len(ids), -1)).mean(1)
            outputs = self.student.get_output_embeddings()
            of_head = [p for p in (outputs.parameters() if outputs else ()) if p.requires_grad]
            return distance(*both, self._rows, of_head)


@dataclass
class _Hidden(BaseModelOutputWithPastAndCrossAttentions):  # type: ignore[misc]
    """The output of a decoder, with all that classes read of it."""

    router_logits: Any = None


def hidden_states(
    model: Any, ids: torch.Tensor, positions: torch.Tensor | None = None, cache: Cache | None = None
) -> torch.Tensor:
    """The decoder's output for `ids [B, T]` at `positions [B, T]`: `[B, T, E]`, without a cache or through one."""
    kept = {"use_cache": False} if cache is None else {"use_cache": True, CACHE: cache}
    return model.get_decoder()(input_ids=ids, **kept, **positioned(positions)).last_hidden_state


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The class's logits `[n, vocabulary]`, in fp32, of hidden states `[n, E]`."""
    decoder, ids = model.get_decoder(), torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    own = decoder.__dict__.get("forward")  # accelerate's hooks are there
    decoder.forward = lambda *args, **kwargs: _Hidden(last_hidden_state=hidden[None])
    try:
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own
    return found[0].float()


def distances(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """`[n]`, KL(expected ‖ found) of each token, from log-probabilities `[n, vocabulary]`."""
    return (expected.exp() * (expected - found)).sum(-1)


def distance(
    hidden: torch.Tensor, head: Head, expected: Expected, rows: int, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The summed loss of N tokens: Σ KL. Differentiable in `hidden` and `parameters`.

    Args:
        hidden: The student's hidden states, `[N, E]`.
        head: Makes its logits.
        expected: Makes the teacher's.
        rows: How many tokens may have logits at once.
        parameters: Those of the head that train.
    """
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    slopes, *of_parameters = (torch.zeros_like(tensor) for tensor in (hidden, *parameters))
    for start in range(0, len(hidden), rows):
        chunk = slice(start, start + rows)
        with torch.no_grad():
            teacher = expected(chunk).log_softmax(-1)
        with torch.enable_grad():
            states = hidden[chunk].detach().requires_grad_(True)
            found = head(states).log_softmax(-1)
            loss = distances(teacher, found).sum()
            slopes[chunk], *others = torch.autograd.grad(loss, [states, *parameters])
        for sum_, other in zip(of_parameters, others, strict=True):
            sum_ += other
        total += loss.detach().double()
    value, gradients = total.to(torch.promote_types(hidden.dtype, torch.float32)), (slopes, *of_parameters)
    return _Known.apply(value, gradients, hidden, *parameters)  # type: ignore[no-untyped-call]


class _Known(torch.autograd.Function):
    """A value whose gradients, by the tensors that follow, are known."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradients: Sequence[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outward: torch.Tensor) -> Any:
        (scale,) = outward
        return None, None, *(gradient * scale for gradient in ctx.saved_tensors)


def measured(hidden: torch.Tensor, head: Head, expected: Expected, targets: torch.Tensor, rows: int) -> torch.Tensor:
    """`[N, 3]`, fp64: each token's KL to the teacher, the student's loss and the teacher's. Arguments as of `distance`.

    `targets [N]` are the tokens that follow.
    """
    parts = []
    with torch.no_grad():
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            teacher, found = expected(chunk).log_softmax(-1), head(hidden[chunk]).log_softmax(-1)
            losses = (nll_loss(one, targets[chunk], reduction="none") for one in (found, teacher))
            parts.append(torch.stack((distances(teacher, found), *losses), 1).double())
    return torch.cat(parts)
