"""Freed memory is kept only where the C library takes the setting; other libraries are left alone."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from eval.machine.memory import keep_freed, release


@pytest.mark.parametrize(("accepts", "calls"), [(1, [-3, -1]), (0, [-3])], ids=["new glibc", "old glibc"])
def test_memory_is_kept_only_where_large_blocks_may_be(accepts: int, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    library = SimpleNamespace(mallopt=lambda what, value: asked.append(what) or accepts)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    keep_freed()
    assert asked == calls, "the second setting alone would make glibc slower than by default"


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    keep_freed()
    release()
