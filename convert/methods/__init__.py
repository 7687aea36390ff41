"""The registry of methods, in the order in which help and reports list them; the first is the default.

Each is the module of its name. Modules are loaded on use, so that `--help` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convert.methods.base import Method

METHODS = ("mean", "first", "random")


def load(name: str) -> Method:
    """The method called `name`, one of `METHODS`."""
    method: Method = import_module(f"convert.methods.{name}").METHOD
    return method
