"""How to get from MHA to GQA, MQA or MLA: `from convert import gqa, mqa, mla, sweep, plan, inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.api import Conversion, Sweep, gqa, inspect, mla, mqa, plan, sweep

__all__ = ["Conversion", "Sweep", "gqa", "inspect", "mla", "mqa", "plan", "sweep"]


def __getattr__(name: str) -> Any:
    """They are imported when first asked for: neither torch nor transformers is needed to read an option."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from convert import api

    return getattr(api, name)
