"""CodeGen: one projection in four blocks, each with the queries, values and keys of a quarter of the heads.

The blocks were the parts of the model on four devices; the class fixes their number. Otherwise it is as GPT-J in
`convert.families.separate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention.spec import AttentionSpec
from convert.families.separate import GPTJ
from convert.families.stacked import StackedProjections

if TYPE_CHECKING:
    import torch

_BLOCKS = 4
_ORDER = [0, 2, 1]  # of queries, keys and values in a block; it is its own inverse


class BlockedProjections(StackedProjections):
    """`qkv_proj [4 (Q, V, K) H/4 D, E]`. Its record is a copy: no view puts the heads of all blocks side by side."""

    layout = "projections in four blocks"

    def unreadable(self, config: Any) -> str | None:
        if (heads := config.num_attention_heads) % _BLOCKS:
            return f"its projections have {_BLOCKS} blocks of equally many heads, and num_attention_heads is {heads}"
        return super().unreadable(config)

    def in_order(self, rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return rows.unflatten(0, (_BLOCKS, 3, -1)).transpose(0, 1)[_ORDER].flatten(0, 2)

    def in_file(self, rows: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return rows.unflatten(0, (3, _BLOCKS, -1))[_ORDER].transpose(0, 1).flatten(0, 2)


ROWS = [BlockedProjections("codegen", **GPTJ)]
