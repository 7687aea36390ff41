"""Converts MHA checkpoints to GQA, MQA or MLA: `from convert import gqa, mqa, mla, heal, sweep, plan, inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.api import Conversion, Healing, Sweep, gqa, heal, inspect, mla, mqa, plan, sweep

__all__ = ["Conversion", "Healing", "Sweep", "gqa", "heal", "inspect", "mla", "mqa", "plan", "sweep"]


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: parsing options needs neither torch nor transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from convert import api

    return getattr(api, name)
