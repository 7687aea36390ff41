"""The registry of methods, in the order in which help and reports list them; the first of each kind is the default.

Each method is the module of the same name. Modules are loaded on first use, so that `--help` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convert.methods.grouped import GroupedMethod
    from convert.methods.latent import LatentMethod

GROUPED = ("aligned", "mean", "first", "random")
LATENT = ("weighted", "svd", "pca")
CONTROLS = ("random",)  # they ruin every model, and run only when asked for by name


def load_grouped(name: str) -> GroupedMethod:
    """The method called `name`, one of `GROUPED`."""
    method: GroupedMethod = import_module(f"convert.methods.{name}").METHOD
    return method


def load_latent(name: str) -> LatentMethod:
    """The method called `name`, one of `LATENT`."""
    method: LatentMethod = import_module(f"convert.methods.{name}").METHOD
    return method
