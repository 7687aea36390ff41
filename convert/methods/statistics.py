"""A method's knowledge of a layer's input: moments and a sample, measured on calibration text or assumed without it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention.qk_norm import QKNorm
from attention.record import HeadProjections
from convert.methods.algebra import augmented
from convert.methods.blocks import Blocks

EXCERPT = 4096  # tokens, on which errors are measured
SURVEYED = 2 * EXCERPT  # of the sample that a survey keeps: few rows hold far distances
IN_MERGES = 200  # the weight of errors of a head that always copies, beside the 1 of every head, where heads are merged


@dataclass(frozen=True)
class Attended:
    """Moments of a layer's input as its attention sees them, fp64, averaged over queries t and (but for `matching`) heads.

    With p_t the attention of query t and x̄_t = E_{s ~ p_t}[x_s], what its head reads: to second order a change Δk of keys costs
    ½ E_t Var_{s ~ p_t}(q_tᵀ Δk_s), and a change Δv of values E_t |W_O E_{s ~ p_t}[Δv_s]|². So nope keys are weighed by the
    covariance within each query's attention, and values by the second moment of what heads read. The sinks of heads are one
    more token, all of whose numbers are zero, also the constant by which biases are weighed.

    Attributes:
        seen: `[E, E]`, E_t E_{s ~ p_t}[x_s x_sᵀ].
        within: `[E, E]`, E_t Cov_{s ~ p_t}(x_s).
        read: `[E, E]`, E_t[x̄_t x̄_tᵀ].
        mean: `[E]`, E_t[x̄_t].
        sunk: `[E + 2]`, E_t[r_t (x̄_t, 1, r_t)], with r_t the attention that a sink takes; None without sinks.
        matching: `[H]`, of queries whose last two tokens stood earlier, the share of attention that is on what followed there.
            Heads with much of it copy (induction heads, Olsson et al., 2022). None without text.
    """

    seen: torch.Tensor
    within: torch.Tensor
    read: torch.Tensor
    mean: torch.Tensor
    sunk: torch.Tensor | None = None
    matching: torch.Tensor | None = None

    @classmethod
    def assumed(cls, second: torch.Tensor, mean: torch.Tensor) -> Attended:
        """For inputs with these moments: keys are compared with all others, and a head reads one token at a time."""
        return cls(second.clone(), second - torch.outer(mean, mean), second.clone(), mean.clone())  # stored one by one

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that there are, by the names of the attributes."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def to(self, device: torch.device) -> Attended:
        return Attended(**{name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def read_covariance(self) -> torch.Tensor:
        """`[E, E]`, Cov_t(x̄_t)."""
        return self.read - torch.outer(self.mean, self.mean)

    @property
    def seen_with_constant(self) -> torch.Tensor:
        """`[E + 1, E + 1]`, `seen` of (x, 1), for weights with a bias as their last column."""
        return _with_constant(self.seen, self.mean, 1 - self._sunk[-2])

    @property
    def within_with_constant(self) -> torch.Tensor:
        """`[E + 1, E + 1]`, `within` of (x, 1): without sinks, a constant on nope keys cancels in the softmax."""
        return _with_constant(self.within, self._sunk[:-2], self._sunk[-2] - self._sunk[-1])

    @property
    def read_with_constant(self) -> torch.Tensor:
        """`[E + 1, E + 1]`, `read` of (x, 1)."""
        return _with_constant(self.read, self.mean - self._sunk[:-2], 1 - 2 * self._sunk[-2] + self._sunk[-1])

    @property
    def _sunk(self) -> torch.Tensor:
        return self.mean.new_zeros(len(self.mean) + 2) if self.sunk is None else self.sunk

    def shrunk(self, tokens: int, towards: torch.Tensor | None) -> Attended:
        """The same with both covariances shrunk as those of so many tokens, towards correlations `[E, E]`; None for none."""
        within, read = _shrunk(self.within, tokens, towards), _shrunk(self.read_covariance, tokens, towards)
        read = read + torch.outer(self.mean, self.mean)
        return replace(self, seen=self.seen + within - self.within, within=within, read=read)

    def importance(self, weight: float | torch.Tensor) -> torch.Tensor:
        """How much squared errors of heads count, `[H, 1, 1]`: 1 + weight · `matching`; `[1, 1, 1]` where that is None."""
        found = self.mean.new_zeros(1) if self.matching is None else weight * self.matching
        return 1 + found[:, None, None]


@dataclass(frozen=True)
class Statistics:
    """Statistics of a layer's input x, the normalised input of its attention.

    Attributes:
        second: `[E, E]`, E[x xᵀ], fp64. It weighs queries, of which each token has one.
        mean: `[E]`, E[x], fp64.
        tokens: How many x were seen; 0 if the statistics are assumed.
        attended: Moments of x as attention sees it, which weigh keys and values.
        sample: The layer's input for some rows of the text, `[n, T, E]`, to fit and to measure errors on; None without text.
        inverse_energy: E_t[1 / |h_t|²] over the sample, with h the residual stream that the layer reads; None without text.
        queries: `[H, D + 1, D + 1]`, the second moment of (q, 1) where an attention reads projections; x is then the keys and
            values of a token, or its latent and its RoPE key, in all moments, and E is their number. None where queries read x.
    """

    second: torch.Tensor
    mean: torch.Tensor
    tokens: int
    attended: Attended
    sample: Blocks | None = None
    inverse_energy: float | None = None
    queries: torch.Tensor | None = None

    @classmethod
    def assumed(cls, width: int, gain: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> Statistics:
        """Statistics from the input norm alone: independent channels of unit variance, times the gain, plus the bias.

        Args:
            width: E.
            gain: `[E]`, or None if there is no norm.
            bias: `[E]` or None.
        """
        gain = torch.ones(width, dtype=torch.float64) if gain is None else gain.double()
        mean = torch.zeros_like(gain) if bias is None else bias.double()
        second = gain.square().diag() + torch.outer(mean, mean)
        return cls(second, mean, 0, Attended.assumed(second, mean))

    def behind(self, projections: HeadProjections) -> Statistics:
        """Assumed statistics of what projections make of x, as if it were normal and each token had the mean square's norm."""
        of_queries, of_both = _expected(projections, self.with_constant)
        moment = self.with_constant
        both, queries = of_both @ moment @ of_both.T, of_queries @ moment @ of_queries.mT
        mean, means = of_both @ moment[-1], (of_queries @ moment[-1])[..., None]
        whole = torch.cat((torch.cat((queries, means), 2), torch.cat((means.mT, torch.ones_like(means[:, :1])), 2)), 1)
        return Statistics(both, mean, 0, Attended.assumed(both, mean), queries=whole)

    def to(self, device: torch.device) -> Statistics:
        return replace(self, **{name: part.to(device) for name, part in vars(self).items() if hasattr(part, "to")})

    @property
    def covariance(self) -> torch.Tensor:
        """`[E, E]`, E[x xᵀ] − E[x] E[x]ᵀ."""
        return self.second - torch.outer(self.mean, self.mean)

    @property
    def with_constant(self) -> torch.Tensor:
        """`[E + 1, E + 1]`, the second moment of (x, 1), for weights with a bias as their last column."""
        return _with_constant(self.second, self.mean, self.mean.new_ones(()))

    @property
    def of_queries(self) -> torch.Tensor:
        """The same of what queries read: `[E + 1, E + 1]`, or `[H, D + 1, D + 1]` of projections."""
        return self.with_constant if self.queries is None else self.queries

    def shrunk(self, projections: HeadProjections | None = None) -> Statistics:
        """The same statistics, whose correlations between channels are trusted less where tokens are few.

        Args:
            projections: What made the channels, or None. Correlations are shrunk towards what its weights make of white inputs,
                so that equal heads stay equal; or towards none.
        """
        towards = None if projections is None else _expected_correlations(projections).to(self.second)
        second = _shrunk(self.covariance, self.tokens, towards) + torch.outer(self.mean, self.mean)
        return replace(self, second=second, attended=self.attended.shrunk(self.tokens, towards))


def _expected(projections: HeadProjections, moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """HeadProjections of (x, 1) as if each token's norm were that of the mean square: `[H, D, E + 1]`, and `[n, E + 1]`.

    Args:
        projections: What normalises or clamps.
        moment: `[E + 1, E + 1]`, of (x, 1).
    """
    a = projections.source
    queries, keys, values = (augmented(*part) for part in ((a.q, a.q_bias), (a.k, a.k_bias), (a.v, a.v_bias)))
    queries, keys = expected_rows(queries, a.q_norm, moment)[0], expected_rows(keys, a.k_norm, moment)[0]
    queries, keys, values = (_clamped(rows, projections.clip, moment) for rows in (queries, keys, values))
    return queries, torch.cat((keys, values)).flatten(0, 1)


def expected_rows(rows: torch.Tensor, norm: QKNorm | None, moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[heads, D, E + 1]` behind a norm of expected size, or as they are, and `[heads, 1, 1]`, what it divides them by."""
    ones = rows.new_ones(len(rows), 1, 1)
    if norm is None:
        return rows, ones
    axes = (1,) if norm.form.scope == "head" else (0, 1)
    if norm.form.kind == "layer":
        rows = rows - rows.mean(axes, keepdim=True)
    size = (((rows @ moment) * rows).sum(-1, keepdim=True).mean(axes, keepdim=True) + norm.form.eps).sqrt()
    rows = rows / size * (norm.gain.to(rows) + norm.form.gain_offset)[..., None]
    if norm.bias is not None:
        rows = torch.cat((rows[..., :-1], rows[..., -1:] + norm.bias.to(rows)[..., None]), -1)
    return rows, ones * size


def _clamped(rows: torch.Tensor, clip: float | None, moment: torch.Tensor) -> torch.Tensor:
    """Rows `[heads, D, E + 1]` behind a clamp, which keeps erf(clip / √2 σ) of a normal number (Bussgang's theorem)."""
    if clip is None:
        return rows
    deviation = ((rows @ moment) * rows).sum(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny).sqrt()
    return rows * torch.erf(clip / (2**0.5 * deviation))


def _with_constant(second: torch.Tensor, mean: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
    """`[E + 1, E + 1]` of `[E, E]`, of the products with a constant `[E]`, and of its square."""
    corner = constant.reshape(1, 1)
    return torch.cat((torch.cat((second, mean[:, None]), 1), torch.cat((mean[None], corner), 1)))


def shrinkage(covariance: torch.Tensor, tokens: int) -> float:
    """The share of the correlation between channels to remove because the tokens are few, 0 to 1; 0 for assumed statistics.

    The oracle approximating shrinkage of a correlation matrix (Chen et al., arXiv 0907.4698, formula 23), as if
    tokens were independent: about E / tokens for white inputs, less for inputs that fill fewer directions.
    """
    if not tokens:
        return 0.0
    deviation = covariance.diagonal().clamp_min(0).sqrt()
    deviation = deviation.where(deviation > 0, 1)
    width, square = len(deviation), float((covariance / torch.outer(deviation, deviation)).square().sum())
    apart = (tokens + 1 - 2 / width) * (square - width)
    return min(1.0, ((1 - 2 / width) * square + width**2) / apart) if apart > 0 else 1.0


def _shrunk(covariance: torch.Tensor, tokens: int, towards: torch.Tensor | None) -> torch.Tensor:
    """The covariance with correlations moved by `shrinkage`, which vanishes with much text, to others, or to none."""
    share = shrinkage(covariance, tokens)
    if towards is None:
        return (1 - share) * covariance + share * covariance.diagonal().diag()
    deviation = covariance.diagonal().clamp_min(0).sqrt()
    return (1 - share) * covariance + share * towards * torch.outer(deviation, deviation)


def _expected_correlations(projections: HeadProjections) -> torch.Tensor:
    """`[n, n]` fp64, between the keys and values of white inputs."""
    white = torch.eye(projections.width + 1, dtype=torch.float64, device=projections.source.k.device)
    rows = torch.nn.functional.normalize(_expected(projections, white)[1][:, :-1], dim=1)
    return rows @ rows.T
