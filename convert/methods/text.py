"""What calibration text is to a method."""

from __future__ import annotations

from enum import Enum


class TextUse(Enum):
    """`IGNORED`: it sees weights only. `USED`: it is better with text. `NEEDED`: it cannot do without."""

    IGNORED = "ignored"
    USED = "used"
    NEEDED = "needed"
