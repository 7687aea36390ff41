"""`svd`: MLA from the weights alone, as if inputs were white (Σ = I) and queries did not matter. No text is needed.

Where a source's projections are read, Σ is that of white inputs behind them.

Keys: per frequency, complex PCA of the KV heads' rows; the components of most energy stay rotary, how many at each frequency
being chosen over all layers together. The rest becomes nope, otherwise unchanged. Values and nope keys: one truncated
singular value decomposition of [K; V], the best joint approximation in the Frobenius norm (Eckart and Young, 1936).

Cost per layer: D/2 eigendecompositions of G × G, once in `losses` and once in `factor`; one eigendecomposition of
size min(2 G D − P, E).
"""

from functools import partial

import torch

from attention.record import Attention, FactoredAttention
from convert.methods.frequencies import pairs_by_loss, shares
from convert.methods.latent import Allocation, LatentMethod, by_subspace, keys_of
from convert.methods.statistics import Statistics
from convert.methods.text import TextUse


def losses(attention: Attention, statistics: Statistics) -> torch.Tensor:
    """`[D/2, G]`: the eigenvalues of Z Z^H at each frequency, largest first."""
    return torch.linalg.eigvalsh(_gram(_white(attention), keys_of(attention)[0])).flip(-1)


def factor(attention: Attention, allocation: Allocation, statistics: Statistics) -> FactoredAttention:
    """The latent attention; at full size it equals the source up to rounding."""
    second = _white(attention)
    return by_subspace(attention, allocation, partial(_gram, second), second)


def _white(attention: Attention) -> torch.Tensor | None:
    """The second moment of what keys and values are made of, for white inputs of the layer; None for the identity."""
    projections = attention.projections
    if projections is None:
        return None
    inputs = Statistics.assumed(projections.width).to(attention.k.device)
    return inputs.behind(projections).second


def _gram(second: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    rows = keys[..., :-1].to(torch.complex128)
    return (rows if second is None else rows @ second.to(rows.dtype)) @ rows.mH


def allocate(found: list[torch.Tensor], count: int, allocation: Allocation) -> tuple[int, ...]:
    """The frequencies with the most energy."""
    return pairs_by_loss([shares(lost) for lost in found], count)


METHOD = LatentMethod("svd", "singular vectors of the weights alone", "", TextUse.IGNORED, False, losses, allocate, factor)
