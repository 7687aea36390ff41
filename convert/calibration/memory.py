"""Giving memory back between layers."""

from __future__ import annotations

import contextlib
import ctypes
import sys


def release() -> None:
    """Return freed memory to the system, where the C library is glibc; elsewhere do nothing.

    glibc keeps freed blocks of up to 32 MB for itself, and aligned ones, as torch asks for, leave holes that the next of the
    same size does not fit: the survey of a model of width 2048 grew by 70 MB with every layer.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
