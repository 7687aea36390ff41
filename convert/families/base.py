"""What a family has to know: where Q, K, V and O live in a checkpoint. Nothing else in this project does.

It knows no method and no target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from attention.record import Attention
from attention.rope import Rotary
from attention.spec import AttentionSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class InputNorm:
    """What normalises the input of an attention.

    Attributes:
        name: Its module; the checkpoint holds `{name}.weight`, and perhaps `{name}.bias`.
        gain_offset: 1 where gain − 1 is stored.
    """

    name: str
    gain_offset: float = 0.0


@dataclass(frozen=True)
class Traits:
    """What the attention of a config has beside four projections, read without weights.

    Attributes:
        qkv_bias: Biases of Q, K and V.
        o_bias: A bias of O.
        qk_norm: What normalises queries and keys, for people; None if nothing does.
        layers_with_rotary: How many layers turn with position.
        adds_output: Whether a layer goes on with the plain sum of its input and its attention's output.
        experts: Whether MLPs are experts, which files hold one by one and the class fused.
        beyond: Config fields that are set and make the class do more than the record says.
    """

    qkv_bias: bool
    o_bias: bool
    qk_norm: str | None
    layers_with_rotary: int
    adds_output: bool
    experts: bool
    beyond: Mapping[str, Any]


def hides_logits(traits: Traits, context: int) -> list[str]:
    """Config fields for which attention, in blocks of `context` tokens, is not the softmax of logits that a record knows."""
    return [field for field, value in traits.beyond.items() if field != "sliding_window" or value < context]


class Family(Protocol):
    """How one model type keeps its attention. `join(split(x)) == x`, bit for bit."""

    @property
    def model_type(self) -> str:
        """As in config.json."""

    @property
    def layout(self) -> str:
        """How the projections lie in the file, for people: "separate projections"."""

    def spec(self, config: Any) -> AttentionSpec:
        """The numbers of `config`'s attention."""

    def module(self, layer: int) -> str:
        """The path of a layer's attention module, whose parent is the decoder layer."""

    def input_norm(self, layer: int) -> InputNorm | None:
        """The norm whose output the layer's attention reads, or None if it has no gains or there is none."""

    def output(self, layer: int) -> str:
        """The path of the module that brings a layer's heads back to the model's width."""

    def traits(self, config: Any) -> Traits:
        """What a config's attention has beside projections; hosts decide on it."""

    def rotary(self, config: Any, layer: int) -> Rotary | None:
        """How the layer's heads turn with position, or None if they do not."""

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of the layer's attention, by its name in the checkpoint, and its shape."""

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Attention:
        """The record of a layer, as views of `tensors` (the names of `shapes`)."""

    def join(self, attention: Attention, layer: int) -> dict[str, torch.Tensor]:
        """The inverse of `split`, for any number of KV heads."""

    def merges_norm_gains(self, config: Any) -> bool:
        """Whether keys are normalised with gains that differ per head, so that merging heads is inexact."""

    def describe(self, config: Any) -> dict[str, Any]:
        """What `convert inspect` says of a config, read without weights."""
