"""What all methods state: their names, where they come from, and how they use calibration text."""

from dataclasses import dataclass
from enum import Enum

ASSUMED_CONTEXT = 2048  # tokens that contexts are taken to have without text


class TextUse(Enum):
    """`IGNORED`: the method sees weights only. `USED`: it is better with text. `NEEDED`: it does not run without text."""

    IGNORED = "ignored"
    USED = "used"
    NEEDED = "needed"


@dataclass(frozen=True)
class Method:
    """The registry entry of a method.

    Attributes:
        name: As on the command line.
        summary: One line for help, plans and cards.
        source: The paper, or "".
        text: How it uses calibration text.
    """

    name: str
    summary: str
    source: str
    text: TextUse
