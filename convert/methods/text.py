"""How a method uses calibration text."""

from __future__ import annotations

from enum import Enum


class TextUse(Enum):
    """`IGNORED`: the method sees weights only. `USED`: it is better with text. `NEEDED`: it does not run without text."""

    IGNORED = "ignored"
    USED = "used"
    NEEDED = "needed"
