"""Blocks of text whose positions may skip."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.methods.blocks import Blocks


def rows(count: int, context: int) -> torch.Tensor:
    return torch.arange(count * context).view(count, context)


def skipping(plain: int, others: int) -> Blocks:
    """Blocks of 16 tokens, of which the last ones skip."""
    blocks = Blocks.whole(rows(plain + others, 16))
    blocks.positions[plain:, 8:] += 100
    return blocks


def test_blocks_have_their_own_positions() -> None:
    text = skipping(2, 1)
    assert [block.x.tolist() for block in text.blocks] == text.rows.tolist()
    assert [list(block.positions) for block in text.blocks] == [[*range(16)]] * 2 + [[*range(8), *range(108, 116)]]
    some = text.of([2, 0])
    assert (some.rows[:, 0].tolist(), some.positions[:, -1].tolist(), some.context) == ([32, 0], [115, 15], 16)
    assert torch.equal(some.to(torch.device("cpu")).positions, some.positions)


def test_some_blocks_are_spread_over_all() -> None:
    assert Blocks.whole(rows(8, 1024)).spread(4096).rows[:, 0].tolist() == [1024, 3072, 5120, 7168]
    assert len(Blocks.whole(rows(3, 8)).spread(4).rows) == 1
    assert Blocks.whole(rows(3, 8)).spread(99).rows.tolist() == rows(3, 8).tolist()


@settings(max_examples=20)
@given(count=st.integers(1, 9), tokens=st.integers(1, 5000))
def test_batches_are_all_blocks_in_order(count: int, tokens: int) -> None:
    batches = Blocks.whole(rows(count, 1024)).batches(tokens)
    assert [row for batch in batches for row in batch] == list(range(count))
    assert all(len(batch) * 1024 <= max(1024, tokens) for batch in batches)


def test_blocks_that_skip_and_others_judge() -> None:
    for plain, others, judging in ((1, 0, [0]), (1, 1, [1]), (2, 1, [1]), (2, 2, [1, 3]), (4, 4, [2, 6]), (8, 0, [4])):
        text = skipping(plain, others)
        assert text.parted()[1] == judging
        assert text.parted()[0] == [row for row in range(plain + others) if row not in judging or plain + others == 1]
