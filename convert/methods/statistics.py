"""What a method knows about a layer's input: moments and a sample, measured on calibration text or assumed without it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Statistics:
    """Statistics of a layer's input x, the normalised input of its attention.

    Attributes:
        second: `[E, E]`, E[x xᵀ], fp64.
        mean: `[E]`, E[x], fp64.
        tokens: How many x were seen; 0 if the statistics are assumed.
        sample: `[n, T, E]`, x of some whole blocks, to measure errors on; None without text.
    """

    second: torch.Tensor
    mean: torch.Tensor
    tokens: int
    sample: torch.Tensor | None = None

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
        return cls(gain.square().diag() + torch.outer(mean, mean), mean, 0)

    def to(self, device: torch.device) -> Statistics:
        sample = None if self.sample is None else self.sample.to(device)
        return Statistics(self.second.to(device), self.mean.to(device), self.tokens, sample)

    @property
    def covariance(self) -> torch.Tensor:
        """`[E, E]`, E[x xᵀ] − E[x] E[x]ᵀ."""
        return self.second - torch.outer(self.mean, self.mean)

    @property
    def with_constant(self) -> torch.Tensor:
        """`[E + 1, E + 1]`, the second moment of (x, 1), for weights with a bias as their last column."""
        one = self.mean.new_ones(1, 1)
        return torch.cat((torch.cat((self.second, self.mean[:, None]), 1), torch.cat((self.mean[None], one), 1)))

    @property
    def shrinkage(self) -> float:
        """The share of the correlation between channels to remove because the tokens are few, 0 to 1.

        The oracle approximating shrinkage of a correlation matrix (Chen et al., arXiv 0907.4698, formula 23), as if
        tokens were independent: about E / tokens for white inputs, less for inputs that fill fewer directions.
        """
        if not self.tokens:
            return 0.0
        deviation = self.covariance.diagonal().clamp_min(0).sqrt()
        deviation = deviation.where(deviation > 0, 1)
        width, square = len(deviation), float((self.covariance / torch.outer(deviation, deviation)).square().sum())
        apart = (self.tokens + 1 - 2 / width) * (square - width)
        return min(1.0, ((1 - 2 / width) * square + width**2) / apart) if apart > 0 else 1.0

    def shrunk(self) -> Statistics:
        """The same statistics with the correlations between channels reduced by `shrinkage`, which vanishes with much text."""
        share, covariance = self.shrinkage, self.covariance
        covariance = (1 - share) * covariance + share * covariance.diagonal().diag()
        return Statistics(covariance + torch.outer(self.mean, self.mean), self.mean, self.tokens, self.sample)
