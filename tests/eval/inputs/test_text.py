"""Text and tokens: what is read, what is refused, and what a hash stands for."""

import os
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import save_tokenizer, sentencepiece_style
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from written import raising

from attention.errors import Failure, Refusal
from eval.inputs import text as texts
from eval.inputs.text import Text, Tokens, encoded, load_dataset, overlap, read_file, tokenize


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """One token a character; adds no BOS."""
    save_tokenizer(tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def opened_by(token: str, tokenizer: Any) -> Any:
    """`tokenizer`, made to put `token` before a text."""
    identity = tokenizer.convert_tokens_to_ids(token)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{token} $A", special_tokens=[(token, identity)])
    return tokenizer


UTF16 = "The quick brown fox".encode("utf-16-le")
UNREAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"^novel\.txt is empty$"),
    "whitespace": (b" \n\t \n", r"^novel\.txt is empty$"),
    "Latin 1": ("Größe".encode("latin-1"), r"novel\.txt is not UTF-8 text: invalid \w+ byte at byte 2$"),
    "UTF-16 without a mark": (b"a line\n" * 9 + UTF16, rf"not UTF-8 text: a NUL at byte {63 + UTF16.index(0)}$"),
    "a NUL": ("é \0 a".encode(), r"not UTF-8 text: a NUL at byte 3$"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_no_text_fails_with_the_place(case: str, tmp_path: Path) -> None:
    content, message = UNREAD[case]
    (tmp_path / "novel.txt").write_bytes(content)
    with pytest.raises(Failure, match=message):
        read_file(tmp_path / "novel.txt")


def test_what_cannot_be_read_to_its_end_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match=r"cannot read .*novel\.txt: No such file or directory"):
        read_file(tmp_path / "novel.txt")
    with pytest.raises(Failure, match=r"cannot read .*: Is a directory"):
        read_file(tmp_path)
    with pytest.raises(Failure, match=r"/dev/zero has more than 16,777,216 bytes"):
        read_file(Path("/dev/zero"))
    (tmp_path / "novel.txt").write_text("a line\n")
    monkeypatch.setattr("eval.inputs.text._MOST", 6)
    with pytest.raises(Failure, match=r"novel\.txt has more than 6 bytes"):
        read_file(tmp_path / "novel.txt")


def test_a_pipe_is_read() -> None:
    read, write = os.pipe()
    os.write(write, b"It was a bright cold day. ")
    os.close(write)
    assert read_file(Path(f"/dev/fd/{read}")).text == "It was a bright cold day. "
    os.close(read)


def test_a_mark_is_left_out_and_line_ends_stay_and_both_are_said(tmp_path: Path, warned: Any) -> None:
    (tmp_path / "notes.txt").write_bytes("\ufeffGröße ≠\r\ntwo".encode())
    assert read_file(tmp_path / "notes.txt") == Text("notes.txt", "Größe ≠\r\ntwo")
    assert warned() == [
        "notes.txt begins with a byte order mark, which is left out",
        "notes.txt has the line ends of Windows (CR LF), which stay: models read few texts like that",
    ]


def test_a_dataset_is_joined_as_papers_join_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, module = [], ModuleType("datasets")

    def read(repository: str, configuration: str, split: str) -> dict[str, list[str]]:
        asked.append((repository, configuration, split))
        return {"text": ["", " = Title = \n", "Line"]}

    module.load_dataset = read  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert load_dataset("wikitext") == Text("wikitext (wikitext-2-raw-v1, test)", "\n\n = Title = \n\n\nLine")
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]
    module.load_dataset = raising(ConnectionError("no route\n  to host"))  # type: ignore[attr-defined]
    with pytest.raises(Failure, match="cannot load the dataset Salesforce/wikitext: no route to host") as caught:
        load_dataset("wikitext")
    assert "--text FILE" in str(caught.value.hint)
    with pytest.raises(Refusal, match=r"no dataset 'wikitxt' \(choose wikitext\)"):
        load_dataset("wikitxt")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Failure, match="--dataset needs the package datasets") as caught:
        load_dataset("wikitext")
    assert caught.value.hint == "pip install 'kvfold[data]', or use --text FILE"


def test_a_text_is_encoded_without_special_tokens_and_its_bytes_are_those_of_utf8(tokenizer: Any) -> None:
    tokens = tokenize(Text("novel", "aé≠😀 d"), opened_by("<s>", tokenizer))
    assert tokens.ids.tolist() == tokenizer.convert_tokens_to_ids(list("aé≠😀 d"))
    assert tokens.ids.dtype == torch.int64
    assert (tokens.name, tokens.text_bytes, tokens.per_byte) == ("novel", 12, 0.5)


def test_a_text_of_one_token_is_too_short(tokenizer: Any) -> None:
    with pytest.raises(Failure, match=r"novel has 1 token\(s\), and it takes at least 2 to predict one"):
        tokenize(Text("novel", "a"), tokenizer)


def tokens_of(ids: list[int], name: str = "novel", dtype: torch.dtype = torch.int64) -> Tokens:
    return Tokens(name, torch.tensor(ids, dtype=dtype), 9, 1.0, None)


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


def test_a_bos_is_what_the_tokenizer_puts_before_a_text(tokenizer: Any) -> None:
    assert tokenize(Text("novel", "abc"), tokenizer).bos is None
    assert tokenize(Text("novel", "abc"), opened_by("<unk>", tokenizer)).bos is None
    assert tokenize(Text("novel", "abc"), opened_by("<s>", tokenizer)).bos == tokenizer.bos_token_id == 1
    tokenizer.bos_token = None
    assert tokenize(Text("novel", "abc"), tokenizer).bos is None


def test_the_hash_is_of_the_ids_alone() -> None:
    ids = [1, 2, 70_000]
    assert tokens_of(ids).hash == tokens_of(ids, "copy", torch.int32).hash
    # printf '\x01\0\0\0\x02\0\0\0\x70\x11\x01\0' | sha256sum
    assert tokens_of(ids).hash == "sha256:313a9de55e88265f756e61a8793c45193dade4a5b645f7f35082452e6b133604"
    for others in ([1, 2, 70_001], [2, 1, 70_000], [1, 2], [1, 2, 70_000, 0]):
        assert tokens_of(others).hash != tokens_of(ids).hash


def test_runs_are_found_at_any_place() -> None:
    ids = torch.randint(1000, (320,), generator=torch.Generator().manual_seed(0))
    assert overlap(ids, ids) == 1
    assert overlap(ids, torch.cat((ids[:5], ids[32:96], ids[:3]))) == 0.2
    assert overlap(ids, ids.flip(0)) == 0
    assert overlap(ids[:10], ids[:30]) == 1


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
        patch.setattr(texts, "_OVERLAP", overlap)
        patch.setattr(texts, "_PIECE", piece)
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
