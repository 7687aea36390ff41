"""Tells whether a device has memory for a model that writes its own text, and for a result that is distilled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attention.errors import Refusal
from eval.machine.capacity import count_parameters
from eval.machine.device import free_memory, whole_memory

if TYPE_CHECKING:
    from convert.planning.calibration import Calibration

_BYTES = 4  # of a weight: models run in fp32 on some devices
_TO_HEAL = 20  # bytes for each weight: source and result in fp32, gradients and moments of attention, activations
_SHARE = 0.8  # of a device's memory that a healing by default may take
HEALED = 65536  # tokens by default, at most: as many as the calibration has


def with_room(calibration: Calibration, config: Any, device: Any) -> Calibration:
    """The calibration of a model, healed by default where a device has memory for that, and none was asked for or ruled out.

    Whatever else uses the memory now does not matter: the same command gives the same plan.

    Raises:
        Refusal: The model has to write its text, and does not fit in memory.
    """
    if calibration.rows_to_write and (missing := lacks_room(config, device)):
        raise Refusal(
            f"the model cannot write its own calibration text: {missing}",
            hint="calibrate on a text with --text FILE; --no-text uses weights alone, and ruins most models",
        )
    if calibration.heal is not None:
        return calibration
    needed = _TO_HEAL * count_parameters(config)
    return replace(calibration, heal=min(HEALED, calibration.tokens) if needed <= _SHARE * whole_memory(device) else 0)


def lacks_room(config: Any, device: Any) -> str | None:
    """The memory that the whole model of a config lacks on a device, or None."""
    needed, free = _BYTES * count_parameters(config), free_memory(device)
    if needed <= free:
        return None
    return f"it takes {needed / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB free"
