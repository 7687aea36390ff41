"""Families whose queries, keys and values are one projection, such as `self_attn.qkv_proj`.

Its rows are those of Q, then of K, then of V; or they have another order, which `in_order` and `in_file` know. Otherwise these
families are as in `convert.families.separate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.separate import WINDOW, SeparateProjections
from convert.families.tables import FUSED_MLP

if TYPE_CHECKING:
    import torch

_PARTS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class StackedProjections(SeparateProjections):
    """One row: a model type and where it differs from Llama, besides its stacked projections.

    Attributes:
        qkv_name: The name of the projection.
    """

    qkv_name: str = "qkv_proj"

    layout = "stacked projections"

    def shapes(self, config: Any, layer: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in super().shapes(config, layer).items():
            stacked = self._stacked(name)
            rows = shapes[stacked][0] if stacked in shapes else 0
            shapes[stacked] = (rows + shape[0], *shape[1:])
        return shapes

    def split(self, tensors: Mapping[str, torch.Tensor], config: Any, layer: int) -> Attention:
        separate, spec = super().shapes(config, layer), self.spec(config)
        parts: dict[str, torch.Tensor] = {}
        for stacked, tensor in tensors.items():
            names = [name for name in separate if self._stacked(name) == stacked]
            rows = self.in_order(tensor, spec) if len(names) > 1 else tensor
            parts |= zip(names, rows.split([separate[name][0] for name in names]), strict=True)
        return super().split(parts, config, layer)

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        import torch

        found: dict[str, list[torch.Tensor]] = {}
        for name, tensor in super().join(record, spec, layer).items():
            found.setdefault(self._stacked(name), []).append(tensor)
        return {name: parts[0] if len(parts) == 1 else self.in_file(torch.cat(parts), spec) for name, parts in found.items()}

    def in_order(self, rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """The rows of the projection, or its biases, as those of all queries, of all keys and of all values."""
        return rows

    def in_file(self, rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """The inverse of `in_order`."""
        return rows

    def _stacked(self, name: str) -> str:
        """The name of the tensor that holds a tensor of the separate layout."""
        module, part, last = name.rsplit(".", 2)
        return f"{module}.{self.qkv_name}.{last}" if part in _PARTS else name


ROWS = [StackedProjections("phi3", names=FUSED_MLP, partial_rotary=True, restarts_cache=True, extra_features=WINDOW)]
