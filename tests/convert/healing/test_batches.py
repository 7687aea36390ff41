"""Blocks to train on: which are held out, in which order the others come, and what is too short."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.errors import Failure
from convert.healing import batches
from convert.healing.batches import TrainingText, encoded
from eval.text import Text, Tokens


class Letters:
    """A tokenizer of single characters."""

    bos_token_id = None

    def __call__(self, text: str, **kwargs: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


def tokens(count: int) -> Tokens:
    return Tokens("a text", torch.arange(count), count, 1.0, None)


def test_a_long_text_is_encoded_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i}\n" for i in range(400)) + "x" * 700 + "\nend"
    whole = encoded(Text("t", text), Letters())
    monkeypatch.setattr(batches, "_PIECE", 128)
    pieces = list(batches._pieces(text))
    assert "".join(pieces) == text
    assert len(pieces) > 20
    assert all(piece.endswith("\n") for piece in pieces[:20])
    found = encoded(Text("t", text), Letters())
    assert found.hash == whole.hash
    assert (found.text_bytes, found.per_byte) == (whole.text_bytes, whole.per_byte)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 400), st.integers(1, 5), st.integers(1, 10**6))
def test_no_block_is_both_trained_on_and_held_out(blocks: int, batch: int, wanted: int) -> None:
    if blocks < batch + 1 + blocks // 50:
        return
    text = TrainingText.of(tokens(blocks * 4 + 3), 4, wanted, batch)
    assert sorted(torch.cat((text.train, text.held_out)).tolist()) == list(range(blocks))
    assert text.blocks[:, 0].tolist() == list(range(0, blocks * 4, 4))
    assert 1 <= len(text.held_out) <= max(1, blocks // 50)


def test_every_pass_sees_every_block_once_in_another_order() -> None:
    text = TrainingText.of(tokens(4 * 11), 4, 10**6, 1)
    assert len(text.train) == 10
    steps = [text.batch(step, 3, seed=5).tolist() for step in range(10)]  # 30 blocks: three passes
    order = [place for step in steps for place in step]
    passes = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(one) == text.train.tolist() for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert text.batch(3, 3, seed=5).tolist() == steps[3]
    assert text.batch(3, 3, seed=6).tolist() != steps[3]
    assert text.passes(10, 3) == 3
    seen = sorted({*steps[0], *steps[1], *text.held_out.tolist()})
    assert text.seen(2, 3, seed=5).tolist() == seen


def test_a_text_shorter_than_a_step_is_named() -> None:
    with pytest.raises(Failure, match=r"a text has 4 blocks of 4 tokens; a step takes 4, beside 1 held out") as error:
        TrainingText.of(tokens(17), 4, 10**6, 4)
    assert "--batch-tokens" in str(error.value.hint)
