"""Text and tokens: what is read, what is refused, and what a hash stands for."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import save_tokenizer, sentencepiece_style

from attention.errors import Failure, Refusal
from eval.inputs import large_file
from eval.inputs.text import Text, Tokens, load_dataset, read_file, tokenize


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """One token a character; adds no BOS."""
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def opened_by(token: str, tokenizer: Any) -> Any:
    """`tokenizer`, made to put `token` before a text."""
    from tokenizers.processors import TemplateProcessing

    identity = tokenizer.convert_tokens_to_ids(token)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{token} $A", special_tokens=[(token, identity)])
    return tokenizer


def test_a_file_is_read_as_utf8_and_named_after_itself(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_bytes("Größe ≠ Höhe\n".encode())
    assert read_file(tmp_path / "novel.txt") == Text("novel.txt", "Größe ≠ Höhe\n")


@pytest.mark.parametrize("content", ["", " \n\t \n"], ids=["empty", "whitespace"])
def test_a_file_without_text_fails(tmp_path: Path, content: str) -> None:
    (tmp_path / "novel.txt").write_text(content, encoding="utf-8")
    with pytest.raises(Failure, match=r"^novel\.txt is empty$"):
        read_file(tmp_path / "novel.txt")


def test_a_file_that_is_not_utf8_fails_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(Failure, match=r"novel\.txt is not UTF-8 text: invalid \w+ byte at byte 2$"):
        read_file(tmp_path / "novel.txt")


@pytest.mark.parametrize("content", ["The quick brown fox".encode("utf-16-le"), b"The quick brown fox \0 jumps"])
@pytest.mark.parametrize("large", [False, True])
def test_nuls_are_no_text(large: bool, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """UTF-16 without a mark passes as UTF-8."""
    (tmp_path / "novel.txt").write_bytes(b"a line\n" * 9 + content + b"\na line" * 9)
    if large:
        monkeypatch.setattr(large_file, "LARGE", 1)
    with pytest.raises(Failure, match=rf"not UTF-8 text: a NUL at byte {63 + content.index(0)}$"):
        read_file(tmp_path / "novel.txt")
    with pytest.raises(Failure, match=rf"not UTF-8 text: a NUL at byte {63 + content.index(0)}$"):
        large_file.excerpts(tmp_path / "novel.txt", 10**6)


def test_a_device_without_an_end_is_not_read_to_its_end() -> None:
    with pytest.raises(Failure, match=r"/dev/zero is not UTF-8 text: a NUL at byte 0$"):
        read_file(Path("/dev/zero"))


@pytest.mark.parametrize("endless", [False, True])
def test_a_pipe_is_read_up_to_a_limit(endless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_file, "LARGE", 2**16)
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), (tmp_path / "pipe").open("wb") as pipe:
            while pipe.write(b"It was a bright cold day. ") and endless:
                pass

    writer = threading.Thread(target=write)
    writer.start()
    if endless:
        with pytest.raises(Failure, match="is no regular file, and holds more than 65,536 bytes, or has no end"):
            read_file(tmp_path / "pipe")
    else:
        assert read_file(tmp_path / "pipe").text == "It was a bright cold day. "
    writer.join()


def test_a_file_that_is_not_there_fails_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"cannot read .*novel\.txt: No such file or directory"):
        read_file(tmp_path / "novel.txt")


def test_a_directory_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"cannot read .*: Is a directory"):
        read_file(tmp_path)


def test_a_dataset_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Failure, match="--dataset needs the package datasets") as caught:
        load_dataset("wikitext")
    assert caught.value.hint == "pip install 'kvfold[data]', or use --text FILE"


def test_an_unknown_dataset_is_refused_with_the_list() -> None:
    with pytest.raises(Refusal, match=r"no dataset 'wikitxt' \(choose wikitext\)") as caught:
        load_dataset("wikitxt")
    assert caught.value.hint == "any other text: --text FILE"


def stand_in(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    module = ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_dataset_is_joined_as_papers_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(repository: str, configuration: str, split: str) -> dict[str, list[str]]:
        asked.append((repository, configuration, split))
        return {"text": ["", " = Title = \n", "Line"]}

    stand_in(monkeypatch, load)
    assert load_dataset("wikitext") == Text("wikitext (wikitext-2-raw-v1, test)", "\n\n = Title = \n\n\nLine")
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]


def test_a_dataset_that_cannot_be_had_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: str, **options: str) -> None:
        raise ConnectionError("no route\n  to host")

    stand_in(monkeypatch, load)
    with pytest.raises(Failure, match="cannot load the dataset Salesforce/wikitext: no route to host") as caught:
        load_dataset("wikitext")
    assert "--text FILE" in str(caught.value.hint)


def test_a_text_is_encoded_without_special_tokens(tokenizer: Any) -> None:
    tokens = tokenize(Text("novel", "abc d"), opened_by("<s>", tokenizer))
    assert tokens.ids.tolist() == tokenizer.convert_tokens_to_ids(list("abc d"))
    assert tokens.ids.dtype == torch.int64
    assert (tokens.name, tokens.text_bytes, tokens.per_byte) == ("novel", 5, 1.0)


def test_tokens_per_byte_counts_utf8_bytes(tokenizer: Any) -> None:
    tokens = tokenize(Text("novel", "aé≠😀"), tokenizer)
    assert (len(tokens.ids), tokens.text_bytes, tokens.per_byte) == (4, 10, 0.4)


def test_a_bos_is_seen_where_the_tokenizer_adds_one(tokenizer: Any) -> None:
    assert tokenize(Text("novel", "abc"), tokenizer).bos is None
    assert tokenize(Text("novel", "abc"), opened_by("<s>", tokenizer)).bos == tokenizer.bos_token_id == 1


def test_another_opening_token_is_no_bos(tokenizer: Any) -> None:
    assert tokenize(Text("novel", "abc"), opened_by("<unk>", tokenizer)).bos is None


def test_a_tokenizer_without_bos_has_none(tokenizer: Any) -> None:
    tokenizer.bos_token = None
    assert tokenize(Text("novel", "abc"), tokenizer).bos is None


def test_a_text_of_one_token_is_too_short(tokenizer: Any) -> None:
    with pytest.raises(Failure, match=r"novel has 1 token\(s\), and it takes at least 2 to predict one"):
        tokenize(Text("novel", "a"), tokenizer)


def tokens_of(ids: list[int], name: str = "novel", dtype: torch.dtype = torch.int64) -> Tokens:
    return Tokens(name, torch.tensor(ids, dtype=dtype), 9, 1.0, None)


def test_the_hash_is_of_the_ids_alone() -> None:
    assert tokens_of([1, 2, 70_000]).hash == tokens_of([1, 2, 70_000], "copy", torch.int32).hash
    # printf '\x01\0\0\0\x02\0\0\0\x70\x11\x01\0' | sha256sum
    assert tokens_of([1, 2, 70_000]).hash == "sha256:313a9de55e88265f756e61a8793c45193dade4a5b645f7f35082452e6b133604"


@pytest.mark.parametrize("ids", [[1, 2, 70_001], [2, 1, 70_000], [1, 2], [1, 2, 70_000, 0]])
def test_the_hash_changes_with_one_token(ids: list[int]) -> None:
    assert tokens_of(ids).hash != tokens_of([1, 2, 70_000]).hash


@pytest.mark.parametrize(
    ("length", "count", "context", "starts"),
    [
        (100, 30, 10, [10, 50, 80]),
        (109, 39, 10, [10, 50, 80]),
        (100, 100, 10, list(range(0, 100, 10))),
        (25, 100, 10, [0, 10]),
        (9, 100, 10, []),
    ],
)
def test_blocks_are_spread_evenly_over_a_text(length: int, count: int, context: int, starts: list[int]) -> None:
    tokens = tokens_of(list(range(length)))
    found = tokens.spread(count, context)
    assert found.ids.tolist() == [start + i for start in starts for i in range(context)]
    assert (found.name, found.text_bytes) == (tokens.name, tokens.text_bytes)


@pytest.mark.parametrize(("count", "last"), [(20, 40), (80, 80)], ids=["within reach", "all that is wanted"])
def test_blocks_come_from_the_part_of_a_text_that_is_encoded(count: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.inputs.text._REACH", 50)
    found = tokens_of(list(range(1000))).spread(count, 10)
    assert found.ids.max() < last + 10


@pytest.mark.parametrize("first", [2, 100, 3000, 10**6])
def test_first_tokens_are_those_of_the_whole_text(first: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.inputs.text._CHARACTERS", 1)  # so that more has to be encoded, as for short tokens
    draw = random.Random(1)
    words = ["".join(draw.choices("aeioubdklmnprst", k=draw.randint(2, 9))) for _ in range(300)]
    text = Text("novel", " ".join(draw.choices(words, k=4000)))
    for encoder in (tokenizer, sentencepiece_style([" ".join(words)])):
        whole, start = tokenize(text, encoder), tokenize(text, encoder, first)
        assert torch.equal(start.ids, whole.ids[:first])
        assert start.text_bytes == whole.text_bytes
        assert start.per_byte == pytest.approx(whole.per_byte, rel=0.1)


def test_no_more_is_encoded_than_first_tokens_need(tokenizer: Any) -> None:
    seen = []

    def counting(text: str, **options: Any) -> Any:
        seen.append(len(text))
        return tokenizer(text, **options)

    counting.bos_token_id = tokenizer.bos_token_id  # type: ignore[attr-defined]
    tokenize(Text("novel", "once upon a time " * 100_000), counting, 500)
    assert sum(seen) < 20_000


def test_a_megabyte_is_encoded_whole_in_seconds_by_a_sentencepiece_style_tokenizer() -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("aeioubdklmnprst", k=draw.randint(2, 9))) for _ in range(2000)]
    text = " ".join(draw.choices(words, k=200_000))[:1_000_000] + " é≠😀"
    tokenizer = sentencepiece_style([" ".join(words)])
    started = time.perf_counter()
    tokens = tokenize(Text("novel", text), tokenizer)
    assert time.perf_counter() - started < 20
    assert tokens.per_byte < 0.6
    assert tokenizer.decode(tokens.ids) == text
