"""The model that is given to `convert gqa` goes one straight line through the code, as scripts/follow.py counts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from written import Make

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "follow.py"))
STAYS, RETURNS, DEPTH = 45, 10, 25


@pytest.mark.usefixtures("writing")
def test_the_model_goes_one_straight_line(shelf: Make) -> None:
    stays, depth = SCRIPT["followed"](shelf())
    assert len(stays) <= STAYS, "\n".join(f"{'  ' * stay.depth}{stay.function}" for stay in stays)
    assert SCRIPT["returns"](stays) <= RETURNS
    assert depth <= DEPTH
