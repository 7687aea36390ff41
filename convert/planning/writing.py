"""Whether a model can write its own text on a device: its weights have to fit in the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention.errors import Refusal
from eval.capacity import count_parameters
from eval.device import free_memory

if TYPE_CHECKING:
    from convert.planning.calibration import Calibration
    from eval.source import Source

_BYTES = 4  # of a weight: models run in fp32 on some devices


def require_room_to_write(source: Source, calibration: Calibration | None, device: Any) -> None:
    """Refuse a calibration on text that the model has to write, and cannot.

    Raises:
        Refusal: The model does not fit in memory.
    """
    if calibration is None or not calibration.rows_to_write:
        return
    if missing := lacks_room(source, device):
        raise Refusal(
            f"{source.reference} cannot write its own calibration text: {missing}",
            hint="calibrate on a text with --text FILE; --no-text uses weights alone, and ruins most models",
        )


def lacks_room(source: Source, device: Any) -> str | None:
    """What a whole model lacks to run on a device, or None."""
    needed, free = _BYTES * count_parameters(source.config, source.trust_remote_code), free_memory(device)
    if needed <= free:
        return None
    return f"it takes {needed / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB free"
