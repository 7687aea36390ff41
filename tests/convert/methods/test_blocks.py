"""Rows of a text, of which some are cut into shorter blocks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.methods.blocks import Blocks


def rows(count: int, context: int) -> torch.Tensor:
    return torch.arange(count * context).view(count, context)


def test_every_other_row_is_cut_into_four() -> None:
    text = Blocks.mixed(rows(5, 1024))
    assert text.rows[:, 0].tolist() == [0, 2048, 4096, 1024, 3072], "those of one length are neighbours"
    assert (text.cuts, text.context, text.lengths) == ((1, 1, 1, 4, 4), 1024, [1024, 256])
    assert [len(block) for block in text.blocks] == [1024] * 3 + [256] * 8
    assert torch.cat([block.x for block in text.blocks]).tolist() == text.rows.flatten().tolist()
    assert all(list(block.positions) == list(range(len(block))) for block in text.blocks)


def test_what_would_be_short_is_not_cut() -> None:
    for context in (1020, 1026, 512, 8, 1):
        text = Blocks.mixed(rows(4, context))
        assert (text.cuts, text.lengths) == ((1,) * 4, [context])
    assert Blocks.mixed(rows(1, 1024)).cuts == (1,)
    assert Blocks.whole(rows(3, 128)).blocks[1].x.tolist() == list(range(128, 256))


def test_many_rows_stay_whole() -> None:
    assert set(Blocks.mixed(rows(15, 1024)).cuts) == {1, 4}
    assert set(Blocks.mixed(rows(16, 1024)).cuts) == {1}


def test_some_rows_are_spread_over_all() -> None:
    assert Blocks.mixed(rows(8, 1024)).spread(4096).rows[:, 0].tolist() == [2048, 6144, 3072, 7168]
    assert len(Blocks.whole(rows(3, 8)).spread(4).rows) == 1
    assert Blocks.whole(rows(3, 8)).spread(99).rows.tolist() == rows(3, 8).tolist()


@settings(max_examples=20)
@given(count=st.integers(1, 9), tokens=st.integers(1, 5000))
def test_batches_are_all_rows_in_order_and_of_one_length(count: int, tokens: int) -> None:
    text = Blocks.mixed(rows(count, 1024))
    batches = text.batches(tokens)
    assert [row for batch in batches for row in batch] == list(range(count))
    assert all(len(batch) * 1024 <= max(1024, tokens) for batch in batches)
    shaped = [text.shaped(batch, text.rows[batch]) for batch in batches]
    assert [block.tolist() for part in shaped for block in part] == [block.x.tolist() for block in text.blocks]


def test_rows_of_each_length_judge() -> None:
    for count, others in ((1, [0]), (2, [1]), (3, [1]), (4, [1, 3]), (8, [2, 6]), (32, [4, 12, 20, 28])):
        fitted, judging = Blocks.mixed(rows(count, 1024)).parted()
        assert judging == others
        assert fitted == [row for row in range(count) if row not in others or count == 1]
    assert Blocks.whole(rows(8, 6)).parted() == ([0, 1, 2, 3, 5, 6, 7], [4])


def test_rows_are_taken_with_their_cuts() -> None:
    text = Blocks.mixed(rows(5, 1024))
    some = text.of([4, 1])
    assert (some.rows[:, 0].tolist(), some.cuts) == ([3072, 2048], (4, 1))
    assert text.alike([4, 1, 3, 0]) == [[1, 0], [4, 3]]
    assert some.to(torch.device("cpu")).cuts == some.cuts
