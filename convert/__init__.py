"""Converts MHA checkpoints to GQA, MQA or MLA: `from convert import gqa, mqa, mla, heal, sweep, plan, inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.api import gqa, heal, inspect, mla, mqa, plan, sweep
    from convert.execute.conversion import Conversion
    from convert.healing.run import Healing
    from convert.sweeping import Sweep

__all__ = ["Conversion", "Healing", "Sweep", "gqa", "heal", "inspect", "mla", "mqa", "plan", "sweep"]
_RESULTS = {"Conversion": "convert.execute.conversion", "Healing": "convert.healing.run", "Sweep": "convert.sweeping"}


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: parsing options needs neither torch nor transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_RESULTS.get(name, "convert.api")), name)
