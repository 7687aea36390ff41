"""Sends figures to the tracker that the user names, such as tensorboard or wandb, by transformers' callbacks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attention.errors import Failure, Refusal


def require_tracker(name: str) -> None:
    """Make sure that a tracker can be used.

    Raises:
        Refusal: transformers does not know it, or its package is not installed.
    """
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    if name not in INTEGRATION_TO_CALLBACK:
        known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
        raise Refusal(f"transformers knows no tracker {name!r}", hint=f"choose one of {known}")
    if name not in get_available_reporting_integrations():
        raise Refusal(f"the package of the tracker {name} is not installed", hint=f"pip install {name}")


def tracker(name: str, logs: Path) -> Any:
    """The callback of a tracker, as a class.

    Args:
        name: The tracker's.
        logs: The directory of TensorBoard's files.
    """
    from transformers.integrations import get_reporting_integration_callbacks

    os.environ |= {"TENSORBOARD_LOGGING_DIR": str(logs), "WANDB_PROJECT": os.environ.get("WANDB_PROJECT", "kvfold")}
    (callback,) = get_reporting_integration_callbacks([name])

    class Tracker(callback):  # type: ignore[misc, valid-type]
        def on_train_begin(self, *given: Any, **named: Any) -> Any:
            try:
                return super().on_train_begin(*given, **named)
            except Exception as error:  # trackers raise what they like
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
                raise Failure(f"the tracker {name} does not start: {reason}", hint="or heal without --track") from error

    return Tracker
