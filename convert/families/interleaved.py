"""GPT-NeoX (Pythia), and what it shares with others: queries, keys and values are one projection, its rows by KV head.

Of each KV head, the rows are the Qs of its query heads, its K and its V; with as many KV heads as query heads, Q, K, V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attention.record import Record
from attention.spec import AttentionSpec
from convert.families.base import Traits
from convert.families.stacked import StackedProjections
from convert.families.tables import megatron

if TYPE_CHECKING:
    import torch

_LAYERS = "gpt_neox.layers"


@dataclass(frozen=True)
class InterleavedProjections(StackedProjections):
    """`query_key_value [G (H/G + 2) D, E]` and `dense [E, H D]`. Its record is a copy: no view has all queries side by side."""

    o_name: str = "dense"
    shares_heads: bool = False
    qkv_name: str = "query_key_value"

    layout = "interleaved projections"

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        joined = super().join(record, spec, layer)
        return dict(sorted(joined.items(), key=lambda item: item[0].endswith(".bias")))  # weights come first in files

    def in_order(self, rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        import torch

        repeats = spec.num_heads // spec.num_kv_heads
        groups = rows.unflatten(0, (spec.num_kv_heads, repeats + 2, spec.head_dim))
        return torch.cat((groups[:, :repeats].flatten(0, 1), groups[:, -2], groups[:, -1])).flatten(0, 1)

    def in_file(self, rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        import torch

        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = rows.unflatten(0, (-1, spec.head_dim)).split(counts)
        return torch.cat((q.unflatten(0, (len(k), -1)), k[:, None], v[:, None]), 1).flatten(0, 2)


class GPTNeoX(InterleavedProjections):
    """Its class ignores `num_key_value_heads`, so only other classes can share KV heads."""

    def join(self, record: Record, spec: AttentionSpec, layer: int) -> dict[str, torch.Tensor]:
        assert spec.num_kv_heads == spec.num_heads, "the class has as many keys as queries"
        return super().join(record, spec, layer)

    def traits(self, config: Any) -> Traits:
        return replace(super().traits(config), adds_output=not config.use_parallel_residual)


FAMILY = GPTNeoX(
    "gpt_neox",
    names=megatron(_LAYERS, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    partial_rotary=True,
    attention_path=f"{_LAYERS}.{{layer}}.attention",
    base="gpt_neox",
    computed=("inv_freq", ".attention.bias", ".attention.masked_bias"),  # the causal mask of old checkpoints
)
