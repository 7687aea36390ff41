"""Processes that torchrun or `accelerate launch` started together. They share a healing; all else runs in the first of them."""

from __future__ import annotations

import os

from attention.errors import Refusal

# Names of variables by which torch and accelerate find other processes, or ways to share with them.
_NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")


def launched_count() -> int:
    """How many processes torchrun or `accelerate launch` started together."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "LOCAL_RANK" in os.environ else 1


def require_alone(what: str) -> None:
    """Refuse what one process does.

    Raises:
        Refusal: Several were launched.
    """
    if (count := launched_count()) > 1:
        raise Refusal(f"{what} runs in one process, not in {count}", hint="start it without torchrun and accelerate launch")


def is_first() -> bool:
    """Whether this process is the first of those that were launched."""
    return launched_count() == 1 or os.environ.get("RANK", "0") == "0"


def goes_on_alone() -> bool:
    """Whether this process is the first of those that were launched. It then runs as if nothing had launched it."""
    if not is_first():
        return False
    for name in [name for name in os.environ if name in _NAMES or name.startswith(_PREFIXES)]:
        del os.environ[name]
    return True
