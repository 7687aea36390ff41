"""Sends figures to the tracker that the user names, such as tensorboard or wandb, by accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from attention.errors import Failure, Refusal

_PROJECT = "kvfold"


def require_tracker(name: str) -> None:
    """Make sure that a tracker can be used.

    Raises:
        Refusal: accelerate does not know it, or its package is not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    if name not in LOGGER_TYPE_TO_CLASS:
        raise Refusal(f"accelerate knows no tracker {name!r}", hint=f"choose one of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    if name not in map(str, get_available_trackers()):
        raise Refusal(f"the package of the tracker {name} is not installed", hint=f"pip install {name}")


@contextlib.contextmanager
def tracked(accelerator: Any, name: str | None, options: Mapping[str, Any]) -> Iterator[None]:
    """Let `accelerator.log` reach a tracker.

    Args:
        accelerator: Of accelerate.
        name: The tracker's; None for none.
        options: Of the healing, which the tracker shows beside its figures.

    Raises:
        Failure: The tracker does not start.
    """
    if name is not None:
        try:
            accelerator.init_trackers(_PROJECT, config={key: value for key, value in options.items() if value is not None})
        except Exception as error:  # trackers raise what they like
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            raise Failure(f"the tracker {name} does not start: {reason}", hint="or heal without --track") from error
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.trackers.clear()
