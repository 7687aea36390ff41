"""QK-norm: the normalisation of queries and keys that some families apply before (or after) RoPE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class NormForm:
    """A QK-norm as a config states it: RMSNorm or LayerNorm of queries or keys, without its gains.

    Attributes:
        kind: "rms", or "layer" (which subtracts the mean first).
        scope: "head" normalises each head over D; "all" normalises all heads of a token as one vector.
        per_head: Whether each head has its own gains.
        bias: Whether it adds a bias.
        eps: Added to the variance.
        gain_offset: 1 where the checkpoint stores gain − 1 (Gemma).
        after_rotary: Whether it follows RoPE (HunYuan) instead of preceding it.
        fixed: Whether the class has no gains, so that they have to stay one.
    """

    kind: Literal["rms", "layer"]
    scope: Literal["head", "all"]
    per_head: bool
    bias: bool
    eps: float
    gain_offset: float = 0.0
    after_rotary: bool = False
    fixed: bool = False

    def __str__(self) -> str:
        gains = "flat" if self.scope == "all" else "each head's own" if self.per_head else "no" if self.fixed else "shared"
        return f"{self.kind}, {gains} gains"


@dataclass(frozen=True)
class QKNorm:
    """A QK-norm with its gains.

    Attributes:
        form: All but these.
        gain: `[1, D]` if all heads share one gain, else `[heads, D]`.
        bias: Shaped as `gain`, or None.
    """

    form: NormForm
    gain: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def per_head_gains(self) -> bool:
        """Whether each head has its own gains, which a merge of heads must merge too."""
        return self.gain.shape[0] > 1 or self.form.scope == "all"

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise `states [B, heads, T, D]`."""
        unit, _, gain = self._parts(states)
        return unit * gain if self.bias is None else unit * gain + self.bias.to(states.dtype)[:, None]

    def linearised(self, states: torch.Tensor) -> LinearisedNorm:
        """Its derivative where it normalises `states [heads, T, D]`."""
        sized = self.form.scope == "head" or len(states) == 1
        return LinearisedNorm(*self._parts(states), self.form.kind == "layer", sized)

    def _parts(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalised states before gains, one over what they were divided by, and gains, as in `LinearisedNorm`."""
        axes = (-1,) if self.form.scope == "head" else (-3, -1)
        if self.form.kind == "layer":
            states = states - states.mean(axes, keepdim=True)
        inverse = (states.square().mean(axes, keepdim=True) + self.form.eps).rsqrt()
        return states * inverse, inverse, (self.gain.to(states.dtype) + self.form.gain_offset)[:, None]


@dataclass(frozen=True)
class LinearisedNorm:
    """The derivative of a QK-norm. One over several heads is taken to keep its size: each head changes little of that.

    Attributes:
        unit: `[heads, T, D]`, normalised states before gains.
        inverse: `[heads or 1, T, 1]`, one over what they were divided by.
        gain: `[heads or 1, 1, D]`.
        centred: Whether the mean of each head is subtracted.
        sized: Whether each head is divided by its own size, so that it cannot change along itself.
    """

    unit: torch.Tensor
    inverse: torch.Tensor
    gain: torch.Tensor
    centred: bool
    sized: bool

    def __call__(self, change: torch.Tensor) -> torch.Tensor:
        """Of changes `[heads, T, D]` of the states."""
        return self.gain * self._across(change * self.inverse)

    def adjoint(self, pull: torch.Tensor) -> torch.Tensor:
        """The adjoint of that."""
        return self._across(self.gain * pull) * self.inverse

    def of(self, tokens: slice | torch.Tensor) -> LinearisedNorm:
        """The derivative at some of the tokens."""
        return replace(self, unit=self.unit[:, tokens], inverse=self.inverse[:, tokens])

    def part(self, heads: slice) -> LinearisedNorm:
        """The derivative for some of the heads."""
        unit, inverse, gain = (r if len(r) == 1 else r[heads] for r in (self.unit, self.inverse, self.gain))
        return replace(self, unit=unit, inverse=inverse, gain=gain)

    def power(self) -> torch.Tensor:
        """`[heads or 1, D]`, about what it multiplies the squares of changes by."""
        return (self.gain.square() * self.inverse.square().mean(1, keepdim=True))[:, 0]

    def _across(self, change: torch.Tensor) -> torch.Tensor:
        if self.centred and self.sized:
            change = change - change.mean(-1, keepdim=True)
        return change - self.unit * (self.unit * change).mean(-1, keepdim=True) if self.sized else change
