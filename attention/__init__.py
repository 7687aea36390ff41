"""Definition and runtime of a converted attention.

Letters, used everywhere in this project: B batch, T query tokens, S cached tokens, E model width, H query heads,
G KV heads (groups), D head dim. Activations are `[B, heads, T, D]` as in transformers; weights of one layer are
`q [H, D, E]`, `k, v [G, D, E]`, `o [E, H, D]`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention.patch import absorb, load, pack, restore

__all__ = ["absorb", "load", "pack", "restore"]


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: an AttentionSpec needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attention import patch

    return getattr(patch, name)
