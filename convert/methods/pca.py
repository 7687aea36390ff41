"""`pca`: the published conversion from GQA to MLA (TransMLA, arXiv 2502.07864), re-implemented from its formulas.

Keys: in every band of F neighbouring frequencies (`freqfold`), real PCA over all KV heads and the F frequencies, real and
imaginary parts as separate samples, under the statistics of the calibration text. The leading F P/D components of a
band stay rotary, at the band's own frequencies (every (D/P)-th of the source's); F > 1 treats a band's frequencies as
equal, which costs accuracy. The rest becomes nope. Values and nope keys: one joint, uncentred PCA, the keys first
divided by ρ = mean channel norm of nope keys ÷ mean channel norm of values.

Differences: the published code dampens the Gram matrices by 1 % of their mean diagonal (it moves no
eigenvector), takes the statistics of the second step from the model with the first step done everywhere (here both steps
use the source's), leaves out the first P channels of V in ρ (a bug), chooses F on the text that it reports (here F is an
argument), and sends the biases of V and of nope K through the latent (here the first is exact in the output bias and the
second cancels in the softmax). Where P exceeds D, the formula is continued: P/D components stay rotary at every frequency.

Cost per layer: D/(2 F) eigendecompositions of size G F, one of size min(2 G D − P, E),
and where 2 G D − P > E one more of size E if the text's statistics are singular.
"""

from functools import partial

import torch

from attention.record import Attention, FactoredAttention
from convert.methods.frequencies import pairs_by_stride
from convert.methods.latent import Allocation, LatentMethod, by_subspace
from convert.methods.statistics import Statistics
from convert.methods.text import TextUse


def factor(attention: Attention, allocation: Allocation, statistics: Statistics) -> FactoredAttention:
    """The latent attention."""
    device = attention.k.device
    moment, second = statistics.second.to(device), statistics.with_constant.to(device)
    balance = partial(_balance, moment, attention.k.float().flatten(0, 1))
    return by_subspace(attention, allocation, partial(_gram, second), moment, balance)


def _gram(second: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    real, imaginary = keys.real.double(), keys.imag.double()
    return real @ second @ real.mT + imaginary @ second @ imaginary.mT


def _balance(second: torch.Tensor, keys: torch.Tensor, rest: torch.Tensor, values: torch.Tensor) -> float:
    """ρ; 1 where there is nothing to balance: no values, or nope keys that are only rounding errors."""
    norm, whole, other = (_mean_norm(rows, second) for rows in (rest, keys, values))
    return norm / other if norm > 1e-5 * whole and other else 1.0


def _mean_norm(rows: torch.Tensor, second: torch.Tensor) -> float:
    """The mean over channels of the root mean square of rows·x; 0 without rows."""
    rows = rows.double()
    squares = ((rows @ second) * rows).sum(-1)
    return float(squares.clamp_min(0).sqrt().mean()) if len(rows) else 0.0


def allocate(found: list[torch.Tensor], count: int, allocation: Allocation) -> tuple[int, ...]:
    """Frequencies at an even stride; nothing was measured."""
    assert allocation.rotary is not None
    return pairs_by_stride(2 * count, allocation.rotary.dims)


METHOD = LatentMethod(
    "pca",
    "published: real PCA per frequency, balanced joint PCA",
    "arXiv:2502.07864",
    TextUse.NEEDED,
    True,
    None,
    allocate,
    factor,
)
