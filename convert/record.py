"""The records that pass between families, methods and hosts: one layer's attention before and after, and its statistics.

Letters as in `attention`: E model width, H query heads, G KV heads, D head dim, R latent rank, P rotary dims of MLA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.qk_norm import QKNorm
from attention.rope import Rotary


@dataclass(frozen=True)
class Attention:
    """One layer's attention, whatever its checkpoint looked like. Tensors keep the checkpoint's dtype.

    Attributes:
        q: `[H, D, E]`; query head h reads KV head h // (H / G).
        k: `[G, D, E]`.
        v: `[G, D, E]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by before the softmax.
        rotary: How heads turn with position, or None in a layer without positions.
        q_bias: `[H, D]` or None.
        k_bias: `[G, D]` or None.
        v_bias: `[G, D]` or None.
        o_bias: `[E]` or None.
        q_norm: QK-norm of the queries, or None.
        k_norm: QK-norm of the keys, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    scale: float
    rotary: Rotary | None = None
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: QKNorm | None = None
    k_norm: QKNorm | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True)
class FactoredAttention:
    """One layer's multi-head latent attention, as `attention.reference.latent_attention` computes it.

    Attributes:
        q_nope: `[H, D, E]`, queries of keys that do not turn.
        q_rope: `[H, P, E]`, queries of the key that turns.
        k_rope: `[P, E]`, that key, one for all heads.
        down: `[R, E]`, what is kept of a token; R counts no channels that a host adds.
        up_k: `[H, D, R]`.
        up_v: `[H, D, R]`.
        o: `[E, H, D]`.
        scale: What logits are multiplied by before the softmax.
        rotary: How the P dims turn.
        q_nope_bias: `[H, D]` or None.
        q_rope_bias: `[H, P]` or None.
        k_rope_bias: `[P]` or None.
        o_bias: `[E]` or None.
    """

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    k_rope: torch.Tensor
    down: torch.Tensor
    up_k: torch.Tensor
    up_v: torch.Tensor
    o: torch.Tensor
    scale: float
    rotary: Rotary
    q_nope_bias: torch.Tensor | None = None
    q_rope_bias: torch.Tensor | None = None
    k_rope_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None


Record = Attention | FactoredAttention


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
