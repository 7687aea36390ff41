"""Converts MHA checkpoints to GQA, MQA or MLA: `from convert import gqa, mqa, mla, heal, sweep, plan, inspect, refresh`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.api.conversions import gqa, mla, mqa
    from convert.api.facts import inspect, plan, refresh
    from convert.api.heals import heal
    from convert.api.sweeps import sweep
    from convert.execute.describe import Conversion, PlannedConversion
    from convert.healing.describe import Healing, PlannedHealing
    from convert.sweeping import PlannedSweep, Sweep

__all__ = [
    "Conversion", "Healing", "PlannedConversion", "PlannedHealing", "PlannedSweep", "Sweep",
    "gqa", "heal", "inspect", "mla", "mqa", "plan", "refresh", "sweep",
]  # fmt: skip
_MODULES = {
    "api.conversions": ("gqa", "mla", "mqa"),
    "api.facts": ("inspect", "plan", "refresh"),
    "api.heals": ("heal",),
    "api.sweeps": ("sweep",),
    "execute.describe": ("Conversion", "PlannedConversion"),
    "healing.describe": ("Healing", "PlannedHealing"),
    "sweeping": ("PlannedSweep", "Sweep"),
}


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: parsing options needs neither torch nor transformers."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(next(f"convert.{module}" for module, names in _MODULES.items() if name in names)), name)
