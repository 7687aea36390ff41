"""When a healing has come to its end."""

from __future__ import annotations

import pytest

from convert.healing.loop import Point, Progressed


@pytest.mark.parametrize(
    ("found", "stale"),
    [
        ([1.0], False),
        ([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], False),
        ([1.0, 0.5, 0.6, 0.6, 0.6], False),
        ([1.0, 0.5, 0.6, 0.6, 0.6, 0.6], True),
        ([1.0, 1.3, 1.2, 1.15, 1.1, 1.05], False),  # worse than at first, and better each time
        ([1.0, 1.3, 1.4, 1.4, 1.4, 1.4], True),
    ],
)
def test_four_points_that_are_no_better_end_it(found: list[float], stale: bool) -> None:
    curve = [Point(step, step, 0.1, None, kl, kl) for step, kl in enumerate(found)]
    assert Progressed(0.1, {}, curve).is_stale == stale
