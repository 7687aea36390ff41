"""Processes that torchrun or `accelerate launch` started together. They share a healing; all else runs in one."""

import os

from attention.errors import Refusal


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
