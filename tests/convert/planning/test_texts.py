"""The texts that a user names: what they are, how they are recorded, and how blocks are shared out among them."""

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
    several = texts_of(["self", Path("b.txt")], "wikitext")
    assert several == (OWN, TextSource("text", "b.txt"), TextSource("dataset", "wikitext"))
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
        (["self", Path("a.txt")], None, {"text": ["self", "a.txt"]}),
        ("a.txt", "wikitext", {"text": "a.txt", "dataset": "wikitext"}),
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


def test_a_text_given_twice_is_refused() -> None:
    with pytest.raises(Refusal, match=r"the text \./a\.txt is given twice"):
        texts_of([Path("a.txt"), "./a.txt"], None)


def test_a_file_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    (text,) = texts_of(path, None)
    with pytest.raises(Failure, match="cannot read"):
        text.read()
    path.write_text("four score and seven years ago")
    assert text.read().text.startswith("four score")


@pytest.mark.parametrize(
    ("blocks", "counts"), [(8, [8]), (8, [4, 4]), (9, [5, 4]), (3, [1, 1, 1]), (10, [4, 4, 2]), (4, [2, 1, 1]), (100, [50, 50])]
)
def test_blocks_are_shared_out(blocks: int, counts: list[int]) -> None:
    texts = tuple(TextSource("text", str(place)) for place in range(len(counts)))
    assert shared_out(blocks, texts) == counts
    with pytest.raises(Refusal, match=f"{len(texts) - 1} blocks of calibration text cannot come from {len(texts)} texts"):
        shared_out(len(texts) - 1, texts)
