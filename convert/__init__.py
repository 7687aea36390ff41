"""Converts MHA checkpoints to GQA, MQA or MLA: `from convert import gqa, mqa, mla, heal, sweep, plan, inspect, refresh`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.api import gqa, heal, inspect, mla, mqa, plan, refresh, sweep
    from convert.execute.conversion import Conversion, PlannedConversion
    from convert.healing.describe import Healing, PlannedHealing
    from convert.sweeping import PlannedSweep, Sweep

__all__ = [
    "Conversion", "Healing", "PlannedConversion", "PlannedHealing", "PlannedSweep", "Sweep",
    "gqa", "heal", "inspect", "mla", "mqa", "plan", "refresh", "sweep",
]  # fmt: skip
_RESULTS = {
    name: module
    for module, noun in (("execute.conversion", "Conversion"), ("healing.describe", "Healing"), ("sweeping", "Sweep"))
    for name in (noun, f"Planned{noun}")
}


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: parsing options needs neither torch nor transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"convert.{_RESULTS.get(name, 'api')}"), name)
