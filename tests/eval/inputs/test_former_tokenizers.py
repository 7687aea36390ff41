"""Tokenizers of former types split text as their own code does: here by its rules in plain Python, without its packages."""

from __future__ import annotations

import base64
import json
import random
import re
import struct
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex

from attention.errors import Failure, Refusal
from eval.inputs.former_tokenizers import carry_over

CORPUS = "the cat sat on the mat and the dog sat on the cat; that was that. 你好 the end\n" * 3
TEXTS = [
    "the cat", " the cat", "  two  spaces ", "", " ", "a", "\n", "tabs\tand\r\nlines\n\n", "你好, 世界 é 🙂", "▁the", "12 345",
    "that's the dog", "the <u> cat<u>sat <u", "THE CAT", "<u>x<u>",
]  # fmt: skip
NORMAL, UNKNOWN, CONTROL, DEFINED, BYTE = 1, 2, 3, 4, 6


def texts() -> list[str]:
    """Those above, and random ones of what occurs in them."""
    draw, signs = random.Random(0), "".join(TEXTS) + "the cat sat"
    return TEXTS + ["".join(draw.choices(signs, k=draw.randint(1, 50))) for _ in range(300)]


def merged(words: list[list[Any]], count: int) -> list[Any]:
    """What byte-pair encoding learns from words: the most frequent pairs, one after another."""
    found = []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _number = max(pairs.items(), key=lambda item: (item[1], item[0]))
        found.append(left + right)
        words = [joined(word, lambda pair: 0 if pair == found[-1] else None) for word in words]
    return list(dict.fromkeys(found))


def joined(parts: list[Any], rank: Callable[[Any], float | None]) -> list[Any]:
    """Parts after every merge that there is a rank for: the lowest first, and of these the leftmost."""
    parts = list(parts)
    while True:
        ranked = [(found, at) for at in range(len(parts) - 1) if (found := rank(parts[at] + parts[at + 1])) is not None]
        if not ranked:
            return parts
        at = min(ranked)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


# ---- SentencePiece ---------------------------------------------------------------------------------------------------

Piece = tuple[str, float, int]


def pieces(defined: tuple[str, ...] = ()) -> list[Piece]:
    letters = sorted(set(CORPUS.replace(" ", "▁")) - {"\n"})
    learned = merged([list(f"▁{word}") for word in CORPUS.split()], 25)
    first: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    first += [(text, 0.0, DEFINED) for text in defined] + [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    return first + [(text, -float(rank), NORMAL) for rank, text in enumerate(learned + letters)]


def message(*fields: tuple[int, Any]) -> bytes:
    """A message of protocol buffers."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3) + varint(value)
    return out


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def model(found: list[Piece], prefix: bool = True, kind: int = 2, charsmap: bytes = b"", squeeze: bool = False) -> bytes:
    held = [(1, message((1, text.encode()), (2, score), (3, kind_))) for text, score, kind_ in found]
    trainer = message((3, kind), (35, 1), (4, len(found)))
    rules = message((1, b"identity"), (2, charsmap), (3, int(prefix)), (4, int(squeeze)), (5, 1))
    return message(*held, (2, trainer), (3, rules))


def sentencepiece(found: list[Piece], text: str, prefix: bool) -> list[int]:
    """A text's ids: pieces that users defined are kept, the rest is merged by score, and what is in no piece becomes bytes."""
    ids = {piece: number for number, (piece, _, _) in enumerate(found)}
    scores = {piece: -score for piece, score, kind in found if kind == NORMAL}
    defined = [piece for piece, _, kind in found if kind == DEFINED]
    text = ("▁" if prefix and text else "") + text.replace(" ", "▁")
    longest = sorted(defined, key=len, reverse=True)
    split = re.split(f"({'|'.join(map(re.escape, longest))})", text) if defined else [text]
    parts = [part for piece in split for part in ([piece] if piece in defined else joined(list(piece), scores.get))]
    bytewise = ([ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()] for part in parts)
    return [number for numbers in bytewise for number in numbers]


def loaded(directory: Path, files: dict[str, bytes], settings: dict[str, Any], model_type: str) -> Any:
    from transformers import AutoTokenizer

    for name, data in files.items():
        (directory / name).write_bytes(data)
    own = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(own | settings))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    carry_over(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("defined", [(), ("<u>", "<u>x")])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_model_of_sentencepiece(prefix: bool, defined: tuple[str, ...], tmp_path: Path) -> None:
    found = pieces(defined)
    tokenizer = loaded(tmp_path, {"tokenizer.model": model(found, prefix)}, {"add_bos_token": False}, "llama")
    assert len(tokenizer) == len(found)
    for text in texts():
        ids = sentencepiece(found, text, prefix)
        assert tokenizer(text)["input_ids"] == ids, text
        assert tokenizer.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize(("settings", "first"), [({}, [1]), ({"add_bos_token": True}, [1]), ({"add_bos_token": False}, [])])
def test_a_text_begins_as_the_settings_say(settings: dict[str, Any], first: list[int], tmp_path: Path) -> None:
    found = pieces()
    tokenizer = loaded(tmp_path, {"tokenizer.model": model(found)}, settings, "llama")
    assert tokenizer("the cat")["input_ids"] == first + sentencepiece(found, "the cat", prefix=True)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    assert tokenizer("</s>", add_special_tokens=False)["input_ids"] == [2]


def test_tokens_are_found_in_a_text_whatever_their_settings_say(tmp_path: Path) -> None:
    found = pieces()
    size = len(found)
    ends = {
        name: {"content": text, "normalized": True, "single_word": True}
        for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"))
    }
    decoder = {
        "2": {"content": "</s>", "normalized": True, "special": True},
        str(size): {"content": "<|a|>", "normalized": True},
    }
    settings = {**ends, "pad_token": None, "added_tokens_decoder": decoder, "add_bos_token": False}
    added = json.dumps({"<|b|>": size + 1}).encode()
    tokenizer = loaded(tmp_path, {"tokenizer.model": model(found), "added_tokens.json": added}, settings, "llama")
    the = sentencepiece(found, "the", prefix=True)
    assert tokenizer("the</s><|a|>the<|b|>the")["input_ids"] == [*the, 2, size, *the, size + 1, *the]
    assert tokenizer.pad_token is None


def test_a_token_that_is_stated_to_be_null_is_none(tmp_path: Path) -> None:
    found = [*pieces(), ("None", -99.0, NORMAL)]
    tokenizer = loaded(tmp_path, {"tokenizer.model": model(found)}, {"bos_token": None}, "llama")
    assert tokenizer("the")["input_ids"] == sentencepiece(found, "the", prefix=True)


def test_a_token_that_would_get_another_number_is_refused(tmp_path: Path) -> None:
    files = {"tokenizer.model": model(pieces()), "added_tokens.json": json.dumps({"[A]": 900}).encode()}
    with pytest.raises(Refusal, match=r"'\[A\]' is token 900, and after its other tokens it is"):
        loaded(tmp_path, files, {}, "llama")


def test_extra_spaces_are_removed_where_a_model_says_so(tmp_path: Path) -> None:
    found = pieces()
    tokenizer = loaded(tmp_path, {"tokenizer.model": model(found, squeeze=True)}, {"add_bos_token": False}, "llama")
    for text in (text for text in texts() if "▁" not in text):
        plain = re.sub(" +", " ", text).strip(" ")
        assert tokenizer(text)["input_ids"] == sentencepiece(found, plain, prefix=True), text


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (model(pieces(), kind=1), Refusal, "tokenizer.model has type 1; of a former model type, kvfold reads byte pairs"),
        (model(pieces(), charsmap=b"abc"), Refusal, "tokenizer.model has a map of characters"),
        (model([*pieces(), ("hat", 0.0, NORMAL)]), Refusal, "tokenizer.model has pieces of one score"),
        (model([*pieces(), ("hat", -99.0, 5)]), Refusal, "tokenizer.model has pieces that are not used"),
        (model(pieces())[:-3], Failure, "cannot read tokenizer.model as a tokenizer"),
        (b"\xff" * 40, Failure, "cannot read tokenizer.model as a tokenizer"),
        (b"", Failure, "cannot read tokenizer.model as a tokenizer"),
        (message((1, b"\x0f")), Failure, "cannot read tokenizer.model as a tokenizer"),
    ],
)
def test_what_is_not_read_exactly_is_refused(data: bytes, error: type[Exception], said: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(error, match=re.escape(said)):
        carry_over(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    carry_over(tmp_path)  # which is what the hint says


# ---- tiktoken --------------------------------------------------------------------------------------------------------

WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


def test_qwen_s_ranks(tmp_path: Path) -> None:
    single = [bytes([byte]) for byte in range(256)]
    words = [[word.encode()[at : at + 1] for at in range(len(word.encode()))] for word in regex.findall(WORDS, CORPUS)]
    ranks = {token: rank for rank, token in enumerate(single + merged(words, 25))}
    lines = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    tokenizer = loaded(tmp_path, {"qwen.tiktoken": lines}, {}, "qwen2")
    for text in texts():
        parts = [part for word in regex.findall(WORDS, text) for part in joined([bytes([b]) for b in word.encode()], ranks.get)]
        assert tokenizer(text)["input_ids"] == [ranks[part] for part in parts], text
        assert tokenizer.decode([ranks[part] for part in parts]) == text
    special = tokenizer("<|im_start|>a<|im_end|><|endoftext|><|extra_204|>")["input_ids"]
    end = len(ranks)
    assert special == [end + 1, ranks[b"a"], end + 2, end, end + 3 + 204]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|endoftext|>", "<|endoftext|>", None)


def test_a_damaged_file_of_ranks_is_named(tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(b"AAA not\n")
    with pytest.raises(Failure, match=r"cannot read qwen\.tiktoken as a tokenizer"):
        carry_over(tmp_path)
