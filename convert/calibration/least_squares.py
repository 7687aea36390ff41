"""Least squares on calibration text: what the fits of queries, keys and values share.

All take a few steps of preconditioned conjugate gradients over some spans of tokens. Queries and keys minimise
E_t Var_{s ~ p_t} of what a result's logits lack, with p_t the mean of the source's and the result's attention of token t: what
the result attends to wrongly has next to no share of the source's.

Fits of keys and values multiply large matrices in `eval.machine.device.rough`. What logits and outputs lack is computed in fp32
before it is rounded, so that nothing lacks where a result is exact. They lose nothing by it; fits of queries do (MQA of
a model of 135M 0.367 nats, not 0.356), and stay in fp32.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from attention.forward import Heads, spans

SPAN = 128  # tokens
RIDGE = 1e-3  # of the curvature

_STEPS = 7
TOKENS = 8192  # of all blocks together, whose logits are fitted; with 4096, small models lost 3 % more
_LOGITS = 2**27  # attention probabilities that are kept at a time: half a gigabyte


def fitted_spans(heads: int, blocks: int, length: int, tokens: int | None = None) -> list[list[slice]]:
    """For each block the spans of tokens that are fitted: all of them, or as many as time and memory allow, evenly spread.

    The first fitted span differs from block to block, so that all positions have their turn.

    Args:
        heads: Heads that are fitted together.
        blocks: Their number.
        length: Tokens of each block.
        tokens: About how many tokens of all blocks to fit, if time matters.
    """
    count, everything = blocks * length, spans(length, SPAN)
    wanted = max(-(-count // (tokens or count)), -(-heads * count * length // (2 * _LOGITS)))
    stride = min(wanted, len(everything))
    return [everything[(stride // 2 + block) % stride :: stride] for block in range(blocks)]


def missing(source: Heads, result: Heads, parts: list[slice]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of each span, with the same heads of both: p `[h, t, s]`, and by each logit the descent of half the squared error."""
    probabilities, pulls = [], []
    for logits, own in zip(logits_of(source, parts), logits_of(result, parts), strict=True):
        probabilities.append((source.probabilities(logits) + result.probabilities(own)) / 2)
        pulls.append(centred(logits.sub_(own), probabilities[-1]))
    return probabilities, pulls


def logits_of(heads: Heads, parts: Iterable[slice]) -> Iterator[torch.Tensor]:
    """`[h, t, s]` of each part's t tokens, for all s up to the last of them."""
    queries, keys = heads.scale * heads.queries, heads.keys
    for tokens in parts:
        yield queries[:, tokens] @ keys[:, : tokens.stop].mT


def centred(logits: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Half the gradient of the logits' variances under the probabilities, `[h, t, s]`; it takes the place of the logits."""
    pull = logits.mul_(probabilities)
    return pull.addcmul_(probabilities, pull.sum(-1, keepdim=True), value=-1)


def grouped(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """`[H, t, …]` as `[G, n t, …]`, with the n query heads of a KV head together."""
    return rows.unflatten(0, (groups, -1)).flatten(1, 2)


class Fit(Protocol):
    """A least squares problem, as far as one block states it.

    Attributes:
        wanted: `[h, n, m]`, the descent of half the squared error where nothing is changed.
    """

    @property
    def wanted(self) -> torch.Tensor: ...

    def curvature(self, change: torch.Tensor) -> torch.Tensor:
        """`[h, n, m]`, the gradient of half the squared error less that where nothing is changed."""


def solved(
    fits: Sequence[Fit],
    ridge: Callable[[torch.Tensor], torch.Tensor],
    preconditioned: Callable[[torch.Tensor], torch.Tensor],
    apart: bool = True,
) -> torch.Tensor:
    """The change `[h, n, m]` after a few steps of conjugate gradients from zero, over the tokens of all blocks.

    Args:
        fits: One for each block. Their curvatures are added.
        ridge: What is added to these, such that all of it is symmetric and positive.
        preconditioned: Nearly the inverse of that. Where it gives zeros, nothing changes.
        apart: Whether these are h problems, none of which sees another one's change.
    """
    wanted = torch.stack([fit.wanted for fit in fits]).sum(0)

    def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum((1, 2) if apart else (0, 1, 2), keepdim=True)

    change, residual, direction = torch.zeros_like(wanted), wanted, preconditioned(wanted)
    energy = products(residual, direction)
    for _ in range(_STEPS):
        image = torch.stack([fit.curvature(direction) for fit in fits]).sum(0) + ridge(direction)
        length = torch.where(energy > 0, energy / products(direction, image), 0)
        change, residual = change + length * direction, residual - length * image
        step = preconditioned(residual)
        last, energy = energy, products(residual, step)
        direction = step + torch.where(last > 0, energy / last, 0) * direction
    return change


def inverse(matrices: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
    """Of `[h, n, n]`, fp32; the identity for those that are not `used`."""
    whole = matrices.double()
    if used is not None:
        whole = torch.where(used[:, None, None], whole, torch.eye(whole.shape[-1], dtype=whole.dtype, device=whole.device))
    return torch.linalg.inv(whole).float()


def ridged(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The ridge for inputs with this second moment `[E, E]`, and the inverse `[1, E, E]` of the moment with it."""
    ridge = RIDGE * moment.diagonal().mean().clamp_min(1e-30)
    return ridge, inverse((moment + ridge * torch.eye(len(moment)).to(moment))[None])
