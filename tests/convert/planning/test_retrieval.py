"""Rows that retrieve: what comes back in them, and where their tokens stand."""

import pytest
import torch

from convert.planning.retrieval import retrieving

ROWS = torch.randint(0, 1000, (6, 256), generator=torch.Generator().manual_seed(0))


def test_positions_ascend_and_reach_far_below_the_limit() -> None:
    positions = retrieving(ROWS, 4096)[1]
    steps = positions.diff(dim=1)
    assert int(steps.min()) == 1
    assert int(positions.max()) < 4096
    assert (steps > 1).sum(1).max() <= 3, "four stretches"
    assert int(positions.max()) > 2000


@pytest.mark.parametrize("limit", [256, 258])
def test_without_room_nothing_skips(limit: int) -> None:
    assert (retrieving(ROWS, limit)[1] == torch.arange(256)).all()


def test_runs_of_tokens_that_nothing_else_predicts_come_back() -> None:
    rows, _ = retrieving(ROWS, 256)
    again = [_repeated(row.tolist(), 6) for row in rows]
    assert min(again) > 0
    assert max(_repeated(row.tolist(), 6) for row in ROWS) == 0
    assert set(rows.flatten().tolist()) <= set(ROWS.flatten().tolist())
    kept = (rows == ROWS).float().mean()
    assert 0.3 < kept < 0.8, "the rest is text"


def test_the_same_rows_give_the_same() -> None:
    (one, at), (other, there) = retrieving(ROWS, 4096), retrieving(ROWS, 4096)
    assert torch.equal(one, other)
    assert torch.equal(at, there)


def _repeated(row: list[int], size: int) -> int:
    """How many stretches of `size` tokens stood in the row before."""
    seen, count = set[tuple[int, ...]](), 0
    for start in range(len(row) - size + 1):
        stretch = tuple(row[start : start + size])
        count += stretch in seen
        seen.add(stretch)
    return count
