"""A short slice of the damage to what runs leave behind, the same every time."""

from __future__ import annotations

import pytest
from fuzz.left_behind import KINDS, main

COUNTS = {"gguf": 40, "recipe": 40}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_ends_in_one_line_or_in_the_same_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.report.plot.to_svg", lambda models: "<svg/>")  # a sweep's report, of which nothing is damaged
    found = main(COUNTS.get(kind, 4), 5, (kind,))
    assert found.cases == COUNTS.get(kind, 4)
    assert not found.wrong, str(found)
