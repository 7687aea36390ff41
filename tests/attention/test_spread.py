"""Which of many to take."""

from attention.spread import evenly_spread, spread_blocks


def test_the_middles_of_equal_parts() -> None:
    assert [evenly_spread(count, 8) for count in (1, 2, 3, 8)] == [[4], [2, 6], [1, 4, 6], list(range(8))]
    assert spread_blocks(100, 10, 40) == [2, 7]
    assert spread_blocks(1, 10, 40) == [5], "one block at least"
    assert spread_blocks(10**6, 3, 40) == [0, 1, 2]
