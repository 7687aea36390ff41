"""What a host is: the model class that carries a converted attention exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from attention.record import Attention, FactoredAttention
from attention.rope import Rotary
from attention.spec import AttentionSpec
from convert.families import Family


class Host(Protocol):
    """Writes one class's config and tensor names, and refuses with a reason what that class cannot represent."""

    @property
    def name(self) -> str:
        """For plans and the support matrix."""

    @property
    def loads_in(self) -> str:
        """What opens the result: "transformers"."""

    @property
    def opened_by(self) -> str:
        """For the model card: what loads the result exactly."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """For the model card: what to know when running it."""

    @property
    def replaces(self) -> str:
        """What became of a tensor of the source's attention that the class has no name for."""

    @property
    def families(self) -> frozenset[str] | None:
        """The families whose blocks it can carry, given the right config; None for all."""

    def model_type(self, family: Family) -> str:
        """What the result's config.json says it is."""

    def module(self, family: Family, layer: int) -> str:
        """The path of a layer's attention module, whose parent is the decoder layer."""

    def output(self, family: Family, layer: int) -> str:
        """The path of the module that brings the heads of a layer back to the model's width."""

    def drops(self, name: str) -> str | None:
        """Why a tensor of the source that is no part of its attention is left out, or None if it is copied."""

    def refuses(self, family: Family, config: Any, target: AttentionSpec, dtype: str) -> str | None:
        """Why this host cannot carry `target` made from `config` and stored in `dtype`, or None if it can."""

    def reserved(self, kv_lora_rank: int) -> int:
        """How many channels of a latent the class needs for itself."""

    def config(self, raw: Mapping[str, Any], config: Any, target: AttentionSpec, rotary: Rotary | None) -> dict[str, Any]:
        """The new config.json.

        Args:
            raw: The source's, as it was read.
            config: The same with the class's defaults.
            target: What is written.
            rotary: How the rotary key of MLA turns.
        """

    def shapes(self, family: Family, config: Any, target: AttentionSpec, layer: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what `tensors` will give for a source of `config`."""

    def tensors(
        self, family: Family, attention: Attention | FactoredAttention, target: AttentionSpec, layer: int
    ) -> dict[str, torch.Tensor]:
        """The layer's attention under the names that the class expects."""
