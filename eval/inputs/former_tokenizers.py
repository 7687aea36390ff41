"""Tokenizers of former model types become a tokenizer.json: SentencePiece's byte pairs, and the ranks of Qwen's tiktoken.

Their files are read here, so neither package is needed, and transformers' classes take the result as it is. (What transformers
makes of a tokenizer.model drops a space at the start of a text, which SentencePiece keeps.)
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from attention.errors import Failure, Refusal
from eval.inputs.sealed import read_object

_PIECES, _RANKS = "tokenizer.model", "qwen.tiktoken"
_SPACE = "▁"
_NORMAL, _UNKNOWN, _DEFINED, _UNUSED = 1, 2, 4, 5  # types of SentencePiece's pieces
_BYTE_PAIRS = 2  # among its types of models
# How Qwen splits text before it merges bytes, and the tokens that follow those of its file.
_WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
_END = "<|endoftext|>"
_SPECIAL = (_END, "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205)))


def carry_over(directory: Path) -> None:
    """Let transformers read the tokenizer in a directory without its own code.

    Raises:
        Refusal: It is of a kind that is not read here.
        Failure: Its file is damaged.
        OSError: The disk is full.
    """
    path = directory / "tokenizer_config.json"
    stated = read_object(path) or {}
    config = {key: value for key, value in stated.items() if key != "auto_map"}
    file = next((file for name in (_PIECES, _RANKS) if (file := directory / name).is_file()), None)
    if file is not None and not (directory / "tokenizer.json").is_file():
        config = _rewritten(file, config)
    if config != stated:
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _rewritten(file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Write the tokenizer.json of a file beside it, with the tokens that other files add; the settings that are left."""
    read = of_sentencepiece if file.name == _PIECES else of_ranks
    try:
        tokenizer, tokens = read(file.read_bytes(), config)
    except Refusal:  # a ValueError, too
        raise
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise Failure(f"cannot read {file.name} as a tokenizer: {error}", hint="it may be damaged: get it again") from None
    added, special = file.with_name("added_tokens.json"), file.with_name("special_tokens_map.json")
    others = {text: {"id": number} for text, number in (read_object(added) or {}).items()}
    for number, entry in (config.get("added_tokens_decoder") or {}).items():
        others[entry["content"]] = {**entry, "id": int(number)}
    _add(tokenizer, others)
    file.with_name("tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    added.unlink(missing_ok=True)
    if special.is_file():
        special.write_text(json.dumps(_texts(read_object(special) or {}), indent=2), encoding="utf-8")
    left = {key: value for key, value in config.items() if key != "added_tokens_decoder"}
    return {**tokens, **_texts(left), "tokenizer_class": "PreTrainedTokenizerFast"}


def _texts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the texts of tokens alone. Former code finds them as they are, whatever else their settings say."""

    def text(value: Any) -> Any:
        return value["content"] if isinstance(value, dict) and "content" in value else value

    found = {key: [text(item) for item in value] if isinstance(value, list) else text(value) for key, value in settings.items()}
    return {key: value for key, value in found.items() if value is not None or not key.endswith("_token")}


def _add(tokenizer: Tokenizer, others: Mapping[str, Mapping[str, Any]]) -> None:
    """Add tokens by their texts, each with its id and what else is known of it.

    Raises:
        Refusal: An id is not the next one.
    """
    for text, known in sorted(others.items(), key=lambda item: item[1]["id"]):
        kept = {name: bool(known.get(name, False)) for name in ("lstrip", "rstrip", "special")}
        tokenizer.add_tokens([AddedToken(text, normalized=False, single_word=False, **kept)])
        if (became := tokenizer.token_to_id(text)) != known["id"]:
            raise Refusal(
                f"the tokenizer's settings say that {text!r} is token {known['id']}, and after its other tokens it is {became}",
                hint="put a tokenizer.json beside it",
            )


def of_ranks(data: bytes, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Qwen's tokenizer from lines of a token in base 64 and its rank, and settings of its class, whatever is in `config`."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    signs = bytes_to_unicode()
    lines = (line.split() for line in data.splitlines() if line)
    ranks = {"".join(signs[byte] for byte in base64.b64decode(token)): int(rank) for token, rank in lines}
    tokenizer = Tokenizer(BPE(ranks, _merges(ranks), ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _SPECIAL])
    return tokenizer, {"eos_token": _END, "pad_token": _END}


def of_sentencepiece(data: bytes, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a model of SentencePiece with the settings in `config`, and settings of its class.

    Raises:
        Refusal: It does not merge pairs.
    """
    model = list(_fields(data))
    pieces = [_piece(value) for number, value in model if number == 1]
    trained, rules = (dict(_fields(dict(model)[part])) for part in (2, 3))
    if what := _unread(trained, rules, pieces):
        raise Refusal(
            f"tokenizer.model has {what}; of a former model type, kvfold reads byte pairs (type {_BYTE_PAIRS}) of plain text",
            hint="put a tokenizer.json beside it",
        )
    vocabulary = {text: token for token, (text, _, _) in enumerate(pieces)}
    merges = _merges({text: -score for text, score, kind in pieces if kind == _NORMAL})
    unknown = {kind: text for text, _, kind in pieces}[_UNKNOWN]
    defined = [text for text, _, kind in pieces if kind == _DEFINED]
    # A piece that a user defined is kept whole: it is split off, and found as a whole word.
    choices = {"byte_fallback": bool(trained.get(35, 0)), "ignore_merges": bool(defined)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, **choices))
    tokenizer.normalizer = normalizers.Sequence(list(_normalizers(rules)))
    if defined:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(_any_of(defined), "isolated")
    prefix = [decoders.Strip(" ", 1, 0)] if rules.get(3, 1) else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *prefix])
    return tokenizer, {"unk_token": unknown, **_add_ends(tokenizer, config)}


def _unread(trained: Mapping[int, Any], rules: Mapping[int, Any], pieces: list[tuple[str, float, int]]) -> str | None:
    """What a SentencePiece model has that is not read here."""
    scores = [score for text, score, kind in pieces if kind == _NORMAL and len(text) > 1]
    found = {
        f"type {trained.get(3, 1)}": trained.get(3, 1) != _BYTE_PAIRS,
        "a map of characters": bool(rules.get(2)),
        "spaces at other places": bool(trained.get(24, 0)) or not rules.get(5, 1),
        "pieces that are not used": any(kind == _UNUSED for _, _, kind in pieces),
        "pieces of one score": len(set(scores)) < len(scores),  # of two such pairs, SentencePiece merges the left one
    }
    return next((what for what, is_so in found.items() if is_so), None)


def _add_ends(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """Let a text begin and end as the settings in `config` say; the names of the tokens at its ends."""
    named: dict[str, str] = {}
    for key, usual in (("bos_token", "<s>"), ("eos_token", "</s>")):
        stated = config.get(key, usual)
        text = stated.get("content") if isinstance(stated, dict) else stated
        named |= {key: text} if isinstance(text, str) and tokenizer.token_to_id(text) is not None else {}
    first = [named["bos_token"]] if "bos_token" in named and config.get("add_bos_token", True) else []
    last = [named["eos_token"]] if "eos_token" in named and config.get("add_eos_token", False) else []
    special = [(text, tokenizer.token_to_id(text)) for text in (*first, *last)]
    around = [*first, "$A", *last]
    tokenizer.post_processor = processors.TemplateProcessing(around, [*around, *first, "$B:1", *last], special)
    return named


def _normalizers(rules: Mapping[int, Any]) -> Iterator[Any]:
    """What a SentencePiece model does to a text first, by the fields of its rules."""
    if rules.get(4, 1):  # remove extra spaces
        yield from (normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " "))
    if rules.get(3, 1):  # begin with a space
        yield normalizers.Prepend(_SPACE)
    yield normalizers.Replace(" ", _SPACE)


def _any_of(texts: Collection[str]) -> Regex:
    """Longer ones first, as SentencePiece prefers them."""
    longest = sorted(texts, key=len, reverse=True)
    return Regex("|".join(re.sub(r"[^\w\s]", lambda sign: "\\" + sign[0], text) for text in longest))


def _merges(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every two tokens that together are one, in the order of the ranks of that one."""
    return [
        (text[:cut], text[cut:])
        for text in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(text))
        if text[:cut] in ranks and text[cut:] in ranks
    ]


def _piece(data: bytes) -> tuple[str, float, int]:
    """The text, the score and the type of a piece."""
    fields = dict(_fields(data))
    return fields[1].decode(), struct.unpack("<f", fields.get(2, bytes(4)))[0], fields.get(3, _NORMAL)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of every field of a message of protocol buffers: integers, and everything else as bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte, at = data[at], at + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}[key & 7] if key & 7 != 2 else varint()
        if size > len(data) - at:
            raise ValueError("it ends too soon")
        yield key >> 3, data[at : at + size]
        at += size
