"""How a text becomes scored tokens, as known answers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.errors import Failure, Refusal
from eval.inputs.text import Tokens
from eval.quality.protocol import Protocol
from eval.quality.settings import PROTOCOLS

BOS = 1
# Tokens of a text bear their index plus this, so that a block shows where it was cut.
FIRST = 10


def tokens(count: int, bos: int | None = BOS) -> Tokens:
    return Tokens("text", torch.arange(FIRST, FIRST + count), count, 1.0, bos)


def cut(protocol: str, context: int, count: int, bos: int | None = BOS) -> list[tuple[list[int], int]]:
    blocks = Protocol.named(protocol, context).blocks(tokens(count, bos))
    return [(ids, batch.first) for batch in blocks for ids in batch.ids.tolist()]


def scored(protocol: str, context: int, count: int, bos: int | None = BOS) -> list[int]:
    return [token for ids, first in cut(protocol, context, count, bos) for token in ids[first:]]


def test_paper_is_consecutive_blocks_and_drops_the_tail() -> None:
    assert cut("paper", 4, 10, bos=None) == [([10, 11, 12, 13], 1), ([14, 15, 16, 17], 1)]


def test_paper_opens_the_text_and_no_later_block_with_bos() -> None:
    assert cut("paper", 4, 10) == [([1, 10, 11, 12], 1), ([13, 14, 15, 16], 1)]
    assert cut("paper", 4, 11) == [([1, 10, 11, 12], 1), ([13, 14, 15, 16], 1), ([17, 18, 19, 20], 1)]


def test_bos_opens_every_block_with_bos_and_drops_the_tail() -> None:
    assert cut("bos", 4, 10) == [([1, 10, 11, 12], 1), ([1, 13, 14, 15], 1), ([1, 16, 17, 18], 1)]
    assert cut("bos", 4, 12)[-1] == ([1, 19, 20, 21], 1)


def test_sliding_scores_the_second_half_of_every_later_block() -> None:
    assert cut("sliding", 4, 10, bos=None) == [
        ([10, 11, 12, 13], 1),
        ([12, 13, 14, 15], 2),
        ([14, 15, 16, 17], 2),
        ([16, 17, 18, 19], 2),
    ]


def test_sliding_with_an_odd_context_overlaps_by_the_larger_half() -> None:
    assert cut("sliding", 5, 10, bos=None) == [
        ([10, 11, 12, 13, 14], 1),
        ([12, 13, 14, 15, 16], 3),
        ([14, 15, 16, 17, 18], 3),
        ([16, 17, 18, 19], 3),
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_only_block_is_kept_however_short(protocol: str) -> None:
    for context in (14, 2048):
        assert cut(protocol, context, 13) == [([1, *range(10, 23)], 1)]


@settings(deadline=None, max_examples=50)
@given(context=st.integers(2, 14), count=st.integers(2, 60), bos=st.sampled_from([None, BOS]))
def test_sliding_scores_every_token_but_the_first_exactly_once(context: int, count: int, bos: int | None) -> None:
    assert scored("sliding", context, count, bos) == list(range(FIRST if bos else FIRST + 1, FIRST + count))


@settings(deadline=None, max_examples=50)
@given(context=st.integers(2, 14), count=st.integers(2, 60))
def test_bos_scores_every_token_of_full_blocks_once(context: int, count: int) -> None:
    kept = count // (context - 1) * (context - 1) or count
    assert scored("bos", context, count) == list(range(FIRST, FIRST + kept))


@settings(deadline=None, max_examples=50)
@given(context=st.integers(2, 14), count=st.integers(2, 60), bos=st.sampled_from([None, BOS]))
def test_paper_leaves_out_the_first_token_of_every_block(context: int, count: int, bos: int | None) -> None:
    text = [*([BOS] if bos else []), *range(FIRST, FIRST + count)]
    kept = text[: len(text) // context * context] or text
    assert scored("paper", context, count, bos) == [token for i, token in enumerate(kept) if i % context]


def test_protocols_that_there_are_not_are_refused() -> None:
    for context in (1, -5):
        with pytest.raises(Refusal, match=f"a context of {context} predicts nothing: it must be at least 2 tokens"):
            Protocol.named("paper", context)
    with pytest.raises(Refusal, match=r"no protocol 'papre' \(choose paper, bos, sliding\)"):
        Protocol.named("papre", 64)
    with pytest.raises(
        Failure, match="'bos' opens every block with a BOS token, and the model's tokenizer adds none"
    ) as caught:
        cut("bos", 4, 10, bos=None)
    assert caught.value.hint == "use --protocol paper"
