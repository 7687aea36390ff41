"""A short slice of the fuzzer of weight files, the same every time."""

from __future__ import annotations

from fuzz.weight_files import main


def test_damaged_weight_files_end_in_one_line_or_a_checkpoint() -> None:
    found = main(60, 13)
    assert found.cases == 60
    assert found.accepted > 5
    assert not found.tracebacks
    assert not found.hangs
    assert not found.raw
    assert not found.unloadable
