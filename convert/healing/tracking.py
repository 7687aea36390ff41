"""Sends figures to the tracker that the user names, such as tensorboard or wandb, by accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attention.errors import Failure, Refusal

if TYPE_CHECKING:
    from convert.healing.plan import HealPlan

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
def tracked(accelerator: Any, plan: HealPlan) -> Iterator[None]:
    """Let `accelerator.log` reach the plan's tracker, if it has one.

    Raises:
        Failure: The tracker does not start.
    """
    if plan.options.track is not None:
        ((_, options),) = plan.recipe().items()
        try:
            accelerator.init_trackers(_PROJECT, config={name: value for name, value in options.items() if value is not None})
        except Exception as error:  # trackers raise what they like
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            raise Failure(
                f"the tracker {plan.options.track} does not start: {reason}", hint="or heal without --track"
            ) from error
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.trackers.clear()
