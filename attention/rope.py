"""Rotary position embedding: which dims of a head rotate, how fast, and how they are paired (RoFormer, arXiv 2104.09864).

Scaled frequencies come from transformers' own table of scaling types. Classes with a scaling of their own
(HunYuan's `alpha`, Phi-3.5-MoE's `mscale`) are not covered.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from attention.errors import Refusal, one_line

if TYPE_CHECKING:  # listing the families needs neither torch nor transformers
    from collections.abc import Sequence

    import torch

Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rotation:
    """The rotation of heads at T given positions.

    Attributes:
        cos: `[T, P/2]`, times the attention factor.
        sin: `[T, P/2]`, times the attention factor.
        pairing: As in `Rotary`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    pairing: Pairing

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Rotate `states [..., T, D]`; dims beyond P stay as they are."""
        import torch

        pairs = self.cos.shape[-1]
        rope, nope = states[..., : 2 * pairs], states[..., 2 * pairs :]
        axis = -2 if self.pairing == "half" else -1
        first, second = rope.unflatten(-1, _shape(pairs, self.pairing)).unbind(axis)  # [..., T, P/2] each
        rotated = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        if self.pairing == "half":  # one copy
            return torch.cat((*rotated, nope), -1)
        pairwise = torch.stack(rotated, axis).flatten(-2)
        return torch.cat((pairwise, nope), -1) if nope.shape[-1] else pairwise

    @property
    def adjoint(self) -> Rotation:
        """The adjoint: it rotates back, and multiplies by the attention factor again."""
        return replace(self, sin=-self.sin)

    def of(self, tokens: slice | torch.Tensor) -> Rotation:
        """The rotation for some of the tokens."""
        return replace(self, cos=self.cos[tokens], sin=self.sin[tokens])


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding: the first `2 * len(frequencies)` dims of every head rotate; the rest do not.

    Attributes:
        frequencies: `[P/2]` radians per token, fp64.
        pairing: Which two dims form pair i of P/2: "half" (i, i + P/2), as Llama; "interleaved" (2i, 2i + 1), as GPT-J.
        attention_factor: The factor of cosine and sine (YaRN, LongRoPE); 1 otherwise.
        long_frequencies: `[P/2]`, which replace `frequencies` in sequences of more than `long_beyond` tokens (LongRoPE).
        long_beyond: Tokens; see `long_frequencies`.
    """

    frequencies: torch.Tensor
    pairing: Pairing = "half"
    attention_factor: float = 1.0
    long_frequencies: torch.Tensor | None = None
    long_beyond: int | None = None

    @property
    def dims(self) -> int:
        return 2 * len(self.frequencies)

    @property
    def backwards(self) -> Rotary:
        """Pairs turn the other way (nanochat)."""
        long = None if self.long_frequencies is None else -self.long_frequencies
        return replace(self, frequencies=-self.frequencies, long_frequencies=long)

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation for tokens at `positions [T]`."""
        import torch

        angles = positions[:, None].double() * self.frequencies_for(positions).to(positions.device)
        cos, sin = ((f(angles) * self.attention_factor).to(dtype) for f in (torch.cos, torch.sin))
        return Rotation(cos, sin, self.pairing)

    def frequencies_for(self, positions: torch.Tensor) -> torch.Tensor:
        """`[P/2]`, the frequencies for a sequence with tokens at `positions [T]`."""
        if self.long_frequencies is None or self.long_beyond is None or int(positions.max()) < self.long_beyond:
            return self.frequencies
        return self.long_frequencies

    def to_complex(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pairs of rows as complex numbers: RoPE multiplies number l of a head by e^(iθ_l t).

        Args:
            rows: `[heads, D, …]`, the weights of each dim of each head.

        Returns:
            `[heads, P/2, …]` complex, and the nope rows `[heads, D − P, …]`.
        """
        import torch

        rope, nope = rows[:, : self.dims], rows[:, self.dims :]
        axis = 1 if self.pairing == "half" else 2
        return torch.complex(*rope.unflatten(1, _shape(len(self.frequencies), self.pairing)).unbind(axis)), nope

    def from_complex(self, numbers: torch.Tensor, nope: torch.Tensor | None = None) -> torch.Tensor:
        """The inverse of `to_complex`."""
        import torch

        axis = 1 if self.pairing == "half" else 2
        rope = torch.stack((numbers.real, numbers.imag), axis).flatten(1, 2)
        return rope if nope is None else torch.cat((rope, nope), 1)

    def paired(self, rows: torch.Tensor, pairing: Pairing) -> torch.Tensor:
        """Rows `[heads, D, …]` of this pairing, in the order of another one: no number changes."""
        if pairing == self.pairing:
            return rows
        import torch

        rope, nope = rows[:, : self.dims], rows[:, self.dims :]
        rope = rope.unflatten(1, _shape(len(self.frequencies), self.pairing)).transpose(1, 2).flatten(1, 2)
        return torch.cat((rope, nope), 1)

    def select(self, pairs: Sequence[int], pairing: Pairing) -> Rotary:
        """The rotary embedding with the frequencies of `pairs`, in that order, repeats included.

        The result has attention factor 1: the caller has to multiply the keys by the square of this one's.
        """
        long = None if self.long_frequencies is None else self.long_frequencies[list(pairs)]
        return Rotary(self.frequencies[list(pairs)], pairing, 1.0, long, self.long_beyond)


@functools.cache
def no_rotary() -> Rotary:
    """The rotary embedding of no dims: nothing rotates."""
    import torch

    return Rotary(torch.zeros(0, dtype=torch.float64))


def _shape(pairs: int, pairing: Pairing) -> tuple[int, int]:
    """The shape that splits the P rope dims into pairs."""
    return (2, pairs) if pairing == "half" else (pairs, 2)


def from_config(
    config: Any, head_dim: int, pairing: Pairing = "half", layer_type: str | None = None, partial: bool = False
) -> Rotary:
    """The rotary embedding that a transformers config describes.

    Args:
        config: Its `rope_parameters` are read (rope_theta, rope_type, partial_rotary_factor and scaling).
        head_dim: D.
        pairing: Which dims form a pair; configs do not say.
        layer_type: Which entry to read if the config has one per layer type ("full_attention", …).
        partial: Whether the class reads `partial_rotary_factor` even without scaling; most do not.

    Raises:
        Refusal: The parameters give no frequencies for heads of D dims, or frequencies that are not finite.
    """
    parameters = config.rope_parameters
    if layer_type in parameters:
        parameters = parameters[layer_type]
    else:
        layer_type = None
    kind = parameters.get("rope_type", "default")
    try:
        if kind == "default":
            share = (parameters.get("partial_rotary_factor") or 1.0) if partial else 1.0
            rotary = of_base(parameters["rope_theta"], int(head_dim * share), pairing)
        else:
            rotary = _scaled(config, parameters, kind, pairing, layer_type)
    except (RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise Refusal(f"rope_parameters of type {kind!r} do not fit heads of {head_dim}: {one_line(error)}") from None
    if rotary.dims > head_dim:
        raise Refusal(f"heads of {head_dim} dims cannot have {rotary.dims} rotary dims: RoPE rotates pairs of them")
    lists = [rotary.frequencies, *([] if rotary.long_frequencies is None else [rotary.long_frequencies])]
    if not all(frequencies.isfinite().all() for frequencies in lists):
        raise Refusal(f"rope_parameters of type {kind!r} give frequencies that are not finite")
    return rotary


def of_base(theta: float, dims: int, pairing: Pairing = "half") -> Rotary:
    """The rotary embedding of `dims` dims whose pair i rotates by θ^(-2i/dims)."""
    import torch

    exponents = torch.arange(0, dims, 2, dtype=torch.float64) / dims
    return Rotary(theta**-exponents, pairing)


def _scaled(config: Any, parameters: dict[str, Any], kind: str, pairing: Pairing, layer_type: str | None) -> Rotary:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise Refusal(f"RoPE of type {kind!r} is unknown (transformers has default, {', '.join(ROPE_INIT_FUNCTIONS)})")
    scaled = functools.partial(ROPE_INIT_FUNCTIONS[kind], config, torch.device("cpu"), layer_type=layer_type)
    frequencies, factor = scaled()
    if kind != "longrope":
        return Rotary(frequencies.double(), pairing, float(factor))
    beyond = parameters["original_max_position_embeddings"]
    return Rotary(frequencies.double(), pairing, float(factor), scaled(seq_len=beyond + 1)[0].double(), beyond)
