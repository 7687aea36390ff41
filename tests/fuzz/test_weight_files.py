"""A short slice of the fuzzer of weight files, the same every time."""

from __future__ import annotations

from fuzz.weight_files import main


def test_damaged_weight_files_end_in_one_line_or_a_checkpoint() -> None:
    found = main(40, 13)
    assert found.cases == 40
    assert found.accepted > 3
    assert not found.wrong
