"""Processes that torchrun or `accelerate launch` started together. They share a healing; all else runs in the first of them."""

from __future__ import annotations

import os

from attention.errors import Refusal

# By which torch and accelerate find the others, and would wait for them.
_VARIABLES = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip


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


def goes_on_alone() -> bool:
    """Whether this process is the first of those that were launched. It then runs as if it were the only one."""
    if os.environ.get("RANK", "0") != "0":
        return False
    for name in _VARIABLES:
        os.environ.pop(name, None)
    return True
