"""A text that is encoded piece by piece has the tokens that it has as a whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import sentencepiece_style
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eval.inputs import encoding
from eval.inputs.encoding import encoded

DRAW = random.Random(0)
WORDS = ["".join(DRAW.choices("aeioubdklmnprst", k=DRAW.randint(2, 9))) for _ in range(300)]
ENDS = [" ", " ", " ", "  ", "\n", "\n\n", ", ", " 12.5 ", "é≠😀", "\r\n", "\t"]


def byte_level() -> Any:
    """GPT-2's kind of tokenizer: bytes of words that a pattern splits."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [" ".join(WORDS)], trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece_style([" ".join(WORDS)])}


class Slow:
    """One that does not say where its tokens begin."""

    bos_token_id = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.seen = tokenizer, 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.seen += len(text)
        assert "return_offsets_mapping" not in options
        return self._tokenizer(text, **options)


def drawn(seed: int, words: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(ENDS) for _ in range(words))


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 600), st.integers(300, 4000), st.sampled_from([40, 400, 2**13]))
@example(65536, 11, 80, 400)  # a piece shorter than what two share
def test_wherever_a_text_is_cut_its_tokens_are_the_same(kind: str, seed: int, words: int, piece: int, overlap: int) -> None:
    text, tokenizer = drawn(seed, words), TOKENIZERS[kind]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_OVERLAP", overlap)
        patch.setattr(encoding, "PIECE", piece)
        for encoder in (tokenizer, slow := Slow(tokenizer)):
            ids, size = encoded(text, encoder)
            assert ids.tolist() == whole
            assert size == len(text.encode())
        assert slow.seen == len(text)
        for encoder in (tokenizer, slow):
            first, size = encoded(text, encoder, 20)
            assert first[:20].tolist() == whole[:20]
            assert size <= len(text.encode())
        assert slow.seen <= 5 * len(text)


@pytest.mark.parametrize("slow", [False, True])
def test_no_more_is_encoded_than_the_first_tokens_need(slow: bool) -> None:
    text, tokenizer = drawn(0, 20_000), TOKENIZERS["byte level"]
    ids, size = encoded(text, Slow(tokenizer) if slow else tokenizer, 500)
    assert ids[:500].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"][:500]
    assert size < len(text) / 8


def test_tokens_are_int64_where_a_piece_gives_none() -> None:
    class Silent(Slow):
        is_fast = True

        def __call__(self, text: str, **options: Any) -> Any:
            return {"input_ids": [], "offset_mapping": []}

    ids, size = encoded("ab", Silent(None))
    assert (ids.dtype, size) == (torch.int64, 2)
