"""How a model was made, and whether it can be compared with the first one, by its conversion.json and its tokenizer."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from written import Make

from attention.errors import Failure
from eval.inputs.loading import tokens_of
from eval.inputs.source import Source
from eval.inputs.text import Text, overlap
from eval.quality.origin import identity, remarks, seen_share

TEXT = Text("novel.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 5)


def stated(source: Source, content: str | dict[str, Any]) -> Source:
    """The model with this conversion.json."""
    (source.files / "conversion.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return source


def test_how_a_model_was_made_is_taken_from_its_own_provenance(checkpoint: Make) -> None:
    source = Source.parse(str(checkpoint()))
    for content in ("[]", "{", '{"method": "theirs"}', '{"a":' * 5000):
        assert identity(stated(source, content))["method"] is None, "another tool's says nothing"
    found = identity(stated(source, {"kvfold": "0.1.0", "method": "mean", "calibration_hash": "sha256:0"}))
    assert (found["method"], found["calibration_hash"]) == ("mean", "sha256:0")
    for changes in ({"method": 5}, {"calibration_hash": 5}, {"calibration": ["a"]}, {"calibration": {"tokens": "100"}}):
        with pytest.raises(Failure, match=f"conversion.json of .* is damaged: its {next(iter(changes))} is of another type"):
            identity(stated(source, {"kvfold": "0.1.0", "method": "svd"} | changes))


def test_a_model_calibrated_on_this_text_is_found_out(checkpoint: Make) -> None:
    source = Source.parse(str(checkpoint()))
    tokens = tokens_of(source, TEXT)
    seen = tokens.spread(300, 50)
    texts = [{"text": "its own text", "tokens": 100, "hash": "sha256:1"}, {"text": "a", "tokens": 300, "hash": seen.hash}]
    made = {"kvfold": "0.1.0", "calibration": {"texts": texts, "tokens": 400, "context": 50}}
    shares = [seen_share(stated(source, made), tokens, lambda count: tokens, None)]
    texts[1]["hash"] = "sha256:0"
    shares += [seen_share(stated(source, made), tokens, lambda count: tokens, known) for known in (None, tokens)]
    made["healing"] = {"tokens": 100, "passes": 0.25, "texts": [{"text": "a", "hash": tokens.hash}]}
    shares += [seen_share(stated(source, made), tokens, lambda count: tokens, None)]
    assert shares == [overlap(tokens.ids, seen.ids), None, 1, 0.25]
    assert shares[0] > 0


@pytest.fixture
def named(checkpoint: Make) -> Callable[..., Source]:
    """Makes a model of some name, and the conversion.json that names its source and that one's weight files."""

    def make(name: str, of: str = "", **run: Any) -> Source:
        path = checkpoint(name=name)
        if of:
            made = {"kvfold": "0.1.0", "source": {"model": of}, "run": run}
            (path / "conversion.json").write_text(json.dumps(made))
        return Source.parse(str(path))

    return make


def remarked(*sources: Source) -> list[list[str]]:
    return remarks(sources, TEXT, None, tokens_of(sources[0], TEXT))


def test_a_source_its_conversions_and_theirs_are_compared_without_remarks(named: Callable[..., Source]) -> None:
    source = named("source")
    first, second = named("first", "elsewhere/source@main"), named("second", "first")
    assert remarked(source, second, first) == [[]] * 3
    assert remarked(first, second) == [[]] * 2
    moved = named("third", "before", source_files=source.fingerprint)
    healed = {"model.safetensors": [1, 1]} | {f"teacher/{name}": file for name, file in source.fingerprint.items()}
    assert remarked(source, moved, named("healed", "before", source_files=healed)) == [[]] * 3
    assert remarked(named("other"), named("another")) == [[]] * 2, "of models of others, nothing is known"


def test_a_model_that_was_not_made_from_the_first_one_is_remarked(named: Callable[..., Source]) -> None:
    other, made = named("other"), named("made", "source")
    said = "was made from source, and other seems to be another model: give its own source first"
    assert remarked(other, made) == [[], [said]]
    smaller = named("larger", "other", source_files={"model.safetensors": [1, 1]})
    assert "was made from other, and other seems to be another" in remarked(other, smaller)[1][0], "of the same name, not size"


def test_models_in_reversed_order_are_remarked(named: Callable[..., Source]) -> None:
    source, made = named("source"), named("made", "source")
    said = "is what made was made from, so the losses are the wrong way round: give it first"
    assert remarked(made, source) == [[], [said]]


def test_a_result_alone_is_compared_with_nothing(named: Callable[..., Source]) -> None:
    assert remarked(named("made", "source")) == [["is compared with nothing: give source, which it was made from, before it"]]
    assert remarked(named("source")) == [[]]


def test_tokenizers_that_differ_are_remarked(named: Callable[..., Source]) -> None:
    source, other = named("source"), named("other")
    file = other.files / "tokenizer.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"padding": None}, indent=4))
    assert remarked(source, other)[1] == [], "other bytes, and the same tokens"
    vocabulary = said["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    file.write_text(json.dumps(said))
    (remark,) = remarked(source, other)[1]
    assert remark == "has another tokenizer than source, which makes other tokens of this text: its figures mean nothing"
    file.write_text("{}")
    assert "which makes no tokens of this text: cannot load the tokenizer of" in remarked(source, other)[1][0]
