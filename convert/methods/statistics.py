"""What a method knows of a layer's input: its moments and a sample, measured on calibration text or assumed without."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Statistics:
    """What is known of a layer's input x, the normalised input of its attention.

    Attributes:
        second: `[E, E]`, E[x xᵀ], fp64.
        mean: `[E]`, E[x], fp64.
        tokens: How many x there were; 0 where no text was looked at.
        sample: `[n, T, E]`, x of some whole blocks, to try things on; None without text.
    """

    second: torch.Tensor
    mean: torch.Tensor
    tokens: int
    sample: torch.Tensor | None = None

    @classmethod
    def assumed(cls, width: int, gain: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> Statistics:
        """What the input's norm alone says: numbers of unit variance that are independent, times its gain, plus its bias.

        Args:
            width: E.
            gain: `[E]`, or None where nothing normalises the input.
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
        """`[E + 1, E + 1]`, the second moment of (x, 1), for weights that carry a bias as their last column."""
        one = self.mean.new_ones(1, 1)
        return torch.cat((torch.cat((self.second, self.mean[:, None]), 1), torch.cat((self.mean[None], one), 1)))

    @property
    def shrinkage(self) -> float:
        """How far to trust the tokens too little: the share of correlation between channels to leave out, 0 to 1.

        The oracle approximating shrinkage of a correlation matrix (Chen et al., arXiv 0907.4698, formula 23), as if
        tokens were independent: about E / tokens for inputs that are white, less the fewer directions they fill.
        """
        if not self.tokens:
            return 0.0
        deviation = self.covariance.diagonal().clamp_min(0).sqrt()
        deviation = deviation.where(deviation > 0, 1)
        width, square = len(deviation), float((self.covariance / torch.outer(deviation, deviation)).square().sum())
        apart = (self.tokens + 1 - 2 / width) * (square - width)
        return min(1.0, ((1 - 2 / width) * square + width**2) / apart) if apart > 0 else 1.0

    def shrunk(self) -> Statistics:
        """The same with correlations of channels reduced by `shrinkage`; with much text, the same."""
        share, covariance = self.shrinkage, self.covariance
        covariance = (1 - share) * covariance + share * covariance.diagonal().diag()
        return Statistics(covariance + torch.outer(self.mean, self.mean), self.mean, self.tokens, self.sample)
