"""The registry of methods, in the order in which help and reports list them; the first of each kind is the default.

Each method is the module of the same name. Modules are loaded on first use, so that `--help` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attention.errors import Refusal

if TYPE_CHECKING:
    from convert.methods.grouped import GroupedMethod
    from convert.methods.latent import LatentMethod

GROUPED = ("aligned", "mean")
LATENT = ("weighted", "svd", "pca")


def load_grouped(name: str) -> GroupedMethod:
    """The method called `name`, one of `GROUPED`.

    Raises:
        Refusal: There is none of that name.
    """
    method: GroupedMethod = _load(name, GROUPED, "merges heads")
    return method


def load_latent(name: str) -> LatentMethod:
    """As `load_grouped`, of `LATENT`."""
    method: LatentMethod = _load(name, LATENT, "makes a latent")
    return method


def _load(name: str, known: tuple[str, ...], what: str) -> Any:
    if name not in known:
        raise Refusal(f"no method {name!r} {what} (choose {', '.join(known)})")
    return import_module(f"convert.methods.{name}").METHOD
