"""QK-norm: the normalisation of queries and keys that some families apply before (or after) RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NormForm:
    """A QK-norm as a config states it: all of `QKNorm` but its gains.

    Attributes:
        per_head: Whether each head has its own gains.
        bias: Whether it adds a bias.
    """

    kind: Literal["rms", "layer"]
    scope: Literal["head", "all"]
    per_head: bool
    bias: bool
    eps: float
    gain_offset: float = 0.0
    after_rotary: bool = False

    def with_gains(self, gain: torch.Tensor, bias: torch.Tensor | None) -> QKNorm:
        """The norm with these gains, `[1 or heads, D]`, and with a bias of that shape if it has one."""
        return QKNorm(self.kind, self.scope, gain, bias, self.eps, self.gain_offset, self.after_rotary)

    def __str__(self) -> str:
        gains = "flat" if self.scope == "all" else "each head's own" if self.per_head else "shared"
        return f"{self.kind}, {gains} gains"


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm or LayerNorm of queries or keys.

    Attributes:
        kind: "rms", or "layer" (which subtracts the mean first).
        scope: "head" normalises each head over D; "all" normalises all heads of a token as one vector.
        gain: `[1, D]` if all heads share one gain, else `[heads, D]`.
        bias: Shaped as `gain`, or None.
        eps: Added to the variance.
        gain_offset: 1 where the checkpoint stores gain − 1 (Gemma).
        after_rotary: Whether it follows RoPE (HunYuan) instead of preceding it.
    """

    kind: Literal["rms", "layer"]
    scope: Literal["head", "all"]
    gain: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    gain_offset: float = 0.0
    after_rotary: bool = False

    @property
    def per_head_gains(self) -> bool:
        """Whether each head has its own gains, which a merge of heads must merge too."""
        return self.gain.shape[0] > 1 or self.scope == "all"

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise `states [B, heads, T, D]`."""
        axes = (-1,) if self.scope == "head" else (-3, -1)
        if self.kind == "layer":
            states = states - states.mean(axes, keepdim=True)
        states = states * (states.square().mean(axes, keepdim=True) + self.eps).rsqrt()
        states = states * (self.gain.to(states.dtype) + self.gain_offset)[:, None]  # [heads or 1, 1, D]
        return states if self.bias is None else states + self.bias.to(states.dtype)[:, None]
