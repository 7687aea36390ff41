"""The texts that a user names: what they are, how they are recorded, and how blocks are shared out among them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from attention.errors import Failure, Refusal
from convert.planning.texts import OWN, TextSource, as_options, names_of, shared_out, texts_of


def test_a_text_is_what_its_type_and_name_say() -> None:
    assert texts_of(None, None) == ()
    assert texts_of("self", None) == (OWN,)
    assert texts_of(Path("self"), None) == (TextSource("text", "self"),), "a file of that name"
    assert texts_of("a.txt", None) == (TextSource("text", "a.txt"),)
    (strings,) = texts_of(["one", "two"], None)
    assert (strings.kind, strings.name, strings.read().text) == ("strings", "2", "one\n\ntwo")
    several = texts_of({"self": 1, Path("b.txt"): 2.5}, "wikitext")
    assert several == (OWN, TextSource("text", "b.txt", 2.5), TextSource("dataset", "wikitext"))
    assert names_of(several) == "its own text and b.txt and wikitext"
    (written,) = texts_of(Path("calibration/own-text.safetensors"), None)
    assert written.own
    assert written.written == Path("calibration/own-text.safetensors")


@pytest.mark.parametrize(
    ("given", "dataset", "options"),
    [
        ("a.txt", None, {"text": "a.txt"}),
        ("self", None, {"text": "self"}),
        (Path("self"), None, {"text": "./self"}),
        (["a", "b"], None, {"strings": "2"}),
        (None, "wikitext", {"dataset": "wikitext"}),
        ({"self": 1, "a.txt": 1}, None, {"text": ["self", "a.txt"]}),
        ({"self": 1, "a.txt": 2.5}, None, {"text": ["self", "a.txt"], "text_shares": "1,2.5"}),
        ({"self": 2 / 3, "a.txt": 1 / 3}, None, {"text": ["self", "a.txt"], "text_shares": f"{2 / 3!r},{1 / 3!r}"}),
        ({"a.txt": 3}, "wikitext", {"text": "a.txt", "text_shares": "3", "dataset": "wikitext"}),
    ],
)
def test_options_say_the_same_again(
    given: Any, dataset: str | None, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = texts_of(given, dataset)
    assert as_options(found) == options
    elsewhere = as_options(found, absolute=True)
    paths = elsewhere.get("text", [])
    assert all(path == "self" or Path(path).is_absolute() for path in (paths if isinstance(paths, list) else [paths]))
    assert {key: value for key, value in elsewhere.items() if key != "text"} == {
        key: value for key, value in options.items() if key != "text"
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a.txt": 1, "./a.txt": 1}, "the text ./a.txt is given twice"),
        ({"self": 0}, "the share of its own text is 0; it must be a number above 0"),
        ({"a.txt": -1}, "the share of a.txt is -1"),
        ({"a.txt": math.nan}, "the share of a.txt is nan"),
        ({"self": 1e308, "a.txt": 1e308}, "the share of its own text is 1e+308; it must be a number above 0 and at most 1e+12"),
        ({"a.txt": "1"}, "the share of a.txt is 1; it must be a number"),
        ({}, "there is no text among those given"),
    ],
)
def test_texts_that_make_no_sense_are_refused(given: Any, message: str) -> None:
    with pytest.raises(Refusal, match=re.escape(message)):
        texts_of(given, None)


def test_a_file_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    (text,) = texts_of(path, None)
    with pytest.raises(Failure, match="cannot read"):
        text.read()
    path.write_text("four score and seven years ago")
    assert text.read().text.startswith("four score")


@pytest.mark.parametrize(
    ("blocks", "shares", "counts"),
    [(8, (1,), [8]), (8, (1, 1), [4, 4]), (9, (1, 1), [5, 4]), (9, (1, 2), [3, 6]), (3, (1, 100, 1), [1, 1, 1]),
     (10, (1, 1, 1), [4, 4, 2]), (100, (0.001, 1), [1, 99]), (12, (1, 2, 3), [2, 4, 6])],
)  # fmt: skip
def test_blocks_are_shared_out(blocks: int, shares: tuple[float, ...], counts: list[int]) -> None:
    texts = tuple(TextSource("text", str(place), share) for place, share in enumerate(shares))
    assert shared_out(blocks, texts) == counts
    with pytest.raises(Refusal, match=f"{len(shares) - 1} blocks of calibration text cannot come from {len(shares)} texts"):
        shared_out(len(shares) - 1, texts)
