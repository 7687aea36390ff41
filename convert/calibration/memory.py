"""Returns memory to the system between layers."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def release() -> None:
    """Return freed memory to the system, where the C library is glibc; elsewhere do nothing.

    glibc keeps freed blocks of up to 32 MB, and the aligned blocks that torch allocates leave holes that the next block of the
    same size does not fit into: the survey of a model of width 2048 grew by 70 MB per layer.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
