"""Which of many to take."""

from __future__ import annotations

import pytest

from attention.spread import evenly_spread, parted, spread_blocks


def test_the_middles_of_equal_parts() -> None:
    assert [evenly_spread(count, 8) for count in (1, 2, 3, 8)] == [[4], [2, 6], [1, 4, 6], list(range(8))]
    assert spread_blocks(100, 10, 40) == [2, 7]
    assert spread_blocks(1, 10, 40) == [5], "one block at least"
    assert spread_blocks(10**6, 3, 40) == [0, 1, 2]


@pytest.mark.parametrize(("blocks", "judging"), [(1, [0]), (2, [1]), (4, [2]), (8, [4]), (17, [4, 12]), (32, [4, 12, 20, 28])])
def test_other_blocks_judge_than_are_fitted(blocks: int, judging: list[int]) -> None:
    fitted, others = parted(blocks)
    assert others == judging
    assert fitted == [i for i in range(blocks) if blocks == 1 or i not in judging]
