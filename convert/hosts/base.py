"""What a host is: the model class that carries a converted attention exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from attention.spec import AttentionSpec
from convert.families import Attention, Family


class Host(Protocol):
    """Writes one class's config and tensor names, and refuses with a reason what that class cannot represent."""

    @property
    def name(self) -> str:
        """For plans and the support matrix."""

    @property
    def loads_in(self) -> str:
        """What opens the result: "transformers"."""

    def refuses(self, family: Family, config: Any, target: AttentionSpec) -> str | None:
        """Why this host cannot carry `target` made from `config`, or None if it can."""

    def config(self, raw: Mapping[str, Any], target: AttentionSpec) -> dict[str, Any]:
        """The new config.json, from the source's as it was read."""

    def shapes(self, family: Family, config: Any, target: AttentionSpec, layer: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what `tensors` will give for a source of `config`."""

    def tensors(self, family: Family, attention: Attention, layer: int) -> dict[str, torch.Tensor]:
        """The layer's attention under the names that the class expects."""
