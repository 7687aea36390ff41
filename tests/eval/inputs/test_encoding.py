"""Texts that are encoded piece by piece, and files that are too large to read: the tokens are those of the whole text."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import sentencepiece_style

from attention.errors import Failure
from eval.inputs import encoding, large_file
from eval.inputs.encoding import encoded
from eval.inputs.text import Text, read_file, tokenize

DRAW = random.Random(0)
WORDS = ["".join(DRAW.choices("aeioubdklmnprst", k=DRAW.randint(2, 9))) for _ in range(300)]
ENDS = [" ", " ", " ", "  ", "\n", "\n\n", ", ", " 12.5 ", "é≠😀", "\r\n", "\t"]


def byte_level() -> Any:
    """GPT-2's kind of tokenizer: bytes of words that a pattern splits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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


def cut(text: str, *places: int) -> list[str]:
    ends = [*sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 2000), st.lists(st.integers(0, 10**6), max_size=6), st.sampled_from([40, 400, 2**13])
)
@example(65536, 11, [80, 80], 400)  # a piece shorter than what two share
def test_wherever_a_text_is_cut_its_tokens_are_the_same(
    kind: str, seed: int, words: int, places: list[int], overlap: int
) -> None:
    text, tokenizer = drawn(seed, words), TOKENIZERS[kind]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_OVERLAP", overlap)
        for encoder in (tokenizer, slow := Slow(tokenizer)):
            ids, size = encoded(iter(cut(text, *places)), encoder)
            assert ids.tolist() == whole
            assert size == len(text.encode())
    assert slow.seen == len(text)
    first, _ = encoded(iter(cut(text, *places)), slow, 20)
    assert first[:20].tolist() == whole[:20]
    assert slow.seen <= 4 * len(text)


def test_no_more_pieces_are_taken_than_the_first_tokens_need() -> None:
    taken = []

    def pieces() -> Any:
        for i in range(1000):
            taken.append(i)
            yield drawn(i, 2000)

    tokenizer = TOKENIZERS["byte level"]
    ids, _ = encoded(pieces(), tokenizer, 10_000)
    whole = tokenizer("".join(drawn(i, 2000) for i in range(10)), add_special_tokens=False)["input_ids"]
    assert ids[:10_000].tolist() == whole[:10_000]
    assert len(taken) < 8


@pytest.fixture(scope="module")
def many_lines() -> bytes:
    return "".join(f"{i} {drawn(i, 8)}\n".replace("\r", "") for i in range(20_000)).encode()


@pytest.fixture
def large(many_lines: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large, with a number on each line."""
    monkeypatch.setattr(large_file, "LARGE", 2**16)
    for module in ("large_file", "text"):
        monkeypatch.setattr(f"eval.inputs.{module}.PIECE", 2**14)
    path = tmp_path / "large.txt"
    path.write_bytes(many_lines)
    return path


def test_of_a_large_file_the_start_is_read_alone(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = TOKENIZERS["byte level"], []
    large.write_bytes(b"\n".join(large.read_bytes().split(b"\n")[:5000]))  # several times what counts as large
    whole = tokenizer(large.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    decoded = large_file._decoded

    def counted(path: Path) -> Any:
        for part in decoded(path):
            read.append(part)
            yield part

    monkeypatch.setattr(large_file, "_decoded", counted)
    text = read_file(large)
    assert text.size == large.stat().st_size
    assert tokenize(text, tokenizer, 1000).ids.tolist() == whole[:1000]
    assert sum(map(len, read)) < 2**16 < text.size
    assert tokenize(text, tokenizer).ids.tolist() == whole


def test_excerpts_are_lines_from_all_over_a_file(large: Path) -> None:
    text, lines = read_file(large), large.read_text(encoding="utf-8").split("\n")
    part = text.all_over(20_000)
    assert part.file is None
    assert 0.5 < len(part.text) / 160_000 < 1.1
    assert set(part.text.split("\n")) <= set(lines)
    numbers = [int(line.split()[0]) for line in part.text.split("\n") if line[:1].isdigit() and line in lines and " " in line]
    assert numbers[0] < 4_000
    assert numbers[-1] > 16_000
    assert part == read_file(large).all_over(20_000)
    assert text.all_over(10**9) is text


def test_calibration_sees_all_of_a_large_file(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_file, "_EXCERPT", 2**10)
    monkeypatch.setattr("eval.inputs.text._REACH", 8_000)
    text, tokenizer = read_file(large), TOKENIZERS["byte level"]
    tokens = tokenize(text.all_over(8_000), tokenizer, 8_000).spread(2_000, 50)
    found = [int(number) for number in re.findall(r"\n(\d+) ", tokenizer.decode(tokens.ids))]
    assert min(found) < 2_000
    assert max(found) > 18_000
    assert 0.3 < sum(number > 10_000 for number in found) / len(found) < 0.7


def test_lines_longer_than_an_excerpt_are_cut_between_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_file, "LARGE", 2**10)
    (tmp_path / "one-line.txt").write_text("é≠😀a" * 50_000, encoding="utf-8")
    part = read_file(tmp_path / "one-line.txt").all_over(10_000)
    assert set(part.text) == set("é≠😀a\n")


def test_a_fault_far_inside_a_large_file_is_named_by_its_place(large: Path) -> None:
    data = bytearray(large.read_bytes())
    place = len(data) - 5000
    data[place] = 0xFF
    large.write_bytes(data)
    text = read_file(large)
    with pytest.raises(Failure, match=rf"large\.txt is not UTF-8 text: invalid start byte at byte {place}$") as caught:
        list(text.pieces())
    assert caught.value.hint == "convert it: iconv -f ENCODING -t UTF-8"


def test_a_mark_is_left_out_and_line_ends_stay_and_both_are_said(tmp_path: Path, warned: Any) -> None:
    (tmp_path / "notes.txt").write_bytes("\ufeffone\r\ntwo".encode())
    assert read_file(tmp_path / "notes.txt") == Text("notes.txt", "one\r\ntwo")
    assert warned() == [
        "notes.txt begins with a byte order mark, which is left out",
        "notes.txt has the line ends of Windows (CR LF), which stay: models read few texts like that",
    ]


def test_tokens_are_int64_where_one_piece_gives_none() -> None:
    ids, size = encoded(iter(["", "ab"]), TOKENIZERS["byte level"])
    assert (ids.dtype, size) == (torch.int64, 2)
