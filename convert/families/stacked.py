"""Families whose queries, keys and values are one projection, such as `self_attn.qkv_proj`.

Its rows follow each other in an order of their own (`RowOrder`). All else is as in `convert.families.separate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attention.record import Attention, Record
from attention.spec import AttentionSpec
from convert.families.projections import PARTS
from convert.families.separate import GPTJ, WINDOW, SeparateProjections
from convert.families.tables import FUSED_MLP, megatron

if TYPE_CHECKING:
    import torch

Rows = Callable[["torch.Tensor", AttentionSpec], "torch.Tensor"]


@dataclass(frozen=True)
class RowOrder:
    """How the rows of such a projection, or its biases, follow each other in files.

    Attributes:
        layout: For display.
        in_order: Makes rows of a file those of all queries, then of all keys, then of all values.
        in_file: The inverse.
        blocks: Parts with equally many heads.
    """

    layout: str
    in_order: Rows
    in_file: Rows
    blocks: int = 1


def _by_kv_head_in_order(rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    import torch

    repeats = spec.num_heads // spec.num_kv_heads
    groups = rows.unflatten(0, (spec.num_kv_heads, repeats + 2, spec.head_dim))
    return torch.cat((groups[:, :repeats].flatten(0, 1), groups[:, -2], groups[:, -1])).flatten(0, 1)


def _by_kv_head_in_file(rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    import torch

    counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    q, k, v = rows.unflatten(0, (-1, spec.head_dim)).split(counts)
    return torch.cat((q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]), 1).flatten(0, 2)


_BLOCKS = 4
_IN_BLOCK = [0, 2, 1]  # of queries, keys and values; it is its own inverse


def _blocks_in_order(rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    return rows.unflatten(0, (_BLOCKS, 3, -1)).transpose(0, 1)[_IN_BLOCK].flatten(0, 2)


def _blocks_in_file(rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    return rows.unflatten(0, (3, _BLOCKS, -1))[_IN_BLOCK].transpose(0, 1).flatten(0, 2)


BY_PART = RowOrder("stacked projections", lambda rows, spec: rows, lambda rows, spec: rows)
# Of each KV head, the Qs of its query heads, its K and its V: Q, K, V for each head, if there are as many of both.
BY_KV_HEAD = RowOrder("interleaved projections", _by_kv_head_in_order, _by_kv_head_in_file)
# Each block has the queries, values and keys of a quarter of the heads. They were the parts of the model on four devices.
IN_BLOCKS = RowOrder("projections in four blocks", _blocks_in_order, _blocks_in_file, _BLOCKS)


@dataclass(frozen=True)
class StackedProjections(SeparateProjections):
    """One row: a model type and where it differs from Llama, besides its stacked projections.

    Records are copies where no view has all queries side by side.

    Attributes:
        qkv_name: The name of the projection; "" if there are three after all.
        order: How its rows follow each other.
    """

    qkv_name: str = "qkv_proj"
    order: RowOrder = BY_PART

    @property
    def layout(self) -> str:  # type: ignore[override]
        return self.order.layout if self.qkv_name else super().layout

    @property
    def unreadable(self) -> str | None:
        if (heads := self.decoder.num_attention_heads) % (blocks := self.order.blocks):
            return f"its projections have {blocks} blocks of equally many heads, and num_attention_heads is {heads}"
        return super().unreadable

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in super().shapes(layer).items():
            stacked = self._stacked(name)
            rows = shapes[stacked][0] if stacked in shapes else 0
            shapes[stacked] = (rows + shape[0], *shape[1:])
        return shapes

    def split(self, tensors: Mapping[str, torch.Tensor], layer: int) -> Attention:
        separate, spec = super().shapes(layer), self.spec
        parts: dict[str, torch.Tensor] = {}
        for stacked, tensor in tensors.items():
            names = [name for name in separate if self._stacked(name) == stacked]
            rows = self.order.in_order(tensor, spec) if len(names) > 1 else tensor
            parts |= zip(names, rows.split([separate[name][0] for name in names]), strict=True)
        return super().split(parts, layer)

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        import torch

        found: dict[str, list[torch.Tensor]] = {}
        for name, tensor in super().join(record, spec, layer).items():
            found.setdefault(self._stacked(name), []).append(tensor)
        return {
            name: parts[0] if len(parts) == 1 else self.order.in_file(torch.cat(parts), spec) for name, parts in found.items()
        }

    def _stacked(self, name: str) -> str:
        """The name of the tensor that holds a tensor of the separate layout."""
        module, part, last = name.rsplit(".", 2)
        return f"{module}.{self.qkv_name}.{last}" if self.qkv_name and part in PARTS else name


MEGATRON: dict[str, Any] = {
    "qkv_name": "query_key_value",
    "projections": (*PARTS, "dense"),
    "order": BY_KV_HEAD,
    "shares_heads": False,
}

ROWS = [
    StackedProjections("phi3", names=FUSED_MLP, partial_rotary=True, restarts_cache=True, extra_features=WINDOW),
    StackedProjections("codegen", **GPTJ, order=IN_BLOCKS),
    StackedProjections(
        "gpt_neox",
        **MEGATRON,
        names=megatron("gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        partial_rotary=True,
        sums_unless=("use_parallel_residual",),
        attention_path="gpt_neox.layers.{layer}.attention",
        base="gpt_neox",
        computed=("inv_freq", ".attention.bias", ".attention.masked_bias"),  # the causal mask of old checkpoints
    ),
]
