"""When freed memory returns to the system, where the C library is glibc."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed() -> None:
    """Keep freed memory in this process until `release`; with another C library, do nothing.

    By default glibc maps each large block anew, and the kernel fills it with zeros: a sixth of the time of `convert demo`.
    """
    if _call("mallopt", _M_MMAP_THRESHOLD, 2**30):  # glibc before 2.35 refuses such a size
        _call("mallopt", _M_TRIM_THRESHOLD, 2**31 - 1)


def release() -> None:
    """Return freed memory to the system; with another C library, do nothing.

    glibc keeps freed blocks of up to 32 MB, and the aligned blocks that torch allocates leave holes that the next block of the
    same size does not fit into: the survey of a model of width 2048 grew by 70 MB per layer.
    """
    _call("malloc_trim", 0)


def _call(name: str, *values: int) -> int:
    """The result of a function of the C library; 0 where there is no such function."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library
            return int(getattr(ctypes.CDLL(None), name)(*values))
    return 0
