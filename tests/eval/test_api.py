"""`evaluate` and `bench` as programs call them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import Make, damage

from attention.errors import KvfoldError, Refusal
from eval import bench, evaluate
from eval.inputs.source import Source
from eval.inputs.text import Text
from eval.quality.evaluation import report_of
from eval.quality.settings import EvaluationSettings

WORDS = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5


@pytest.fixture
def pair(checkpoint: Make) -> list[Path]:
    return [checkpoint(), checkpoint(name="small", num_key_value_heads=2)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "novel.txt").write_text(WORDS, encoding="utf-8")
    return tmp_path / "novel.txt"


def test_a_report_is_returned_and_nothing_is_printed(pair: list[Path], text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int, str]] = []
    found = evaluate(pair, text=text, context=32, device="cpu", progress=lambda *told: seen.append(told))
    settings = EvaluationSettings(contexts=(32,), device="cpu")
    assert found == report_of([Source.parse(str(path)) for path in pair], Text("novel.txt", WORDS), settings)
    assert capsys.readouterr().out == ""
    tokens = found["models"][0]["tokens"]
    assert seen[0] == ("evaluate small", 0, tokens, "token")
    assert seen[-1] == ("evaluate small", tokens, tokens, "token")
    assert [done for _, done, _, _ in seen] == sorted(done for _, done, _, _ in seen)


def test_text_is_a_path_or_strings(pair: list[Path], text: Path) -> None:
    whole, named, strings = (evaluate(pair[:1], text=given, device="cpu") for given in (text, str(text), [WORDS]))
    assert named == whole == evaluate(str(pair[0]), text=text, device="cpu"), "and a model alone needs no list"
    assert strings["protocol"].pop("text") == "1 strings"
    del whole["protocol"]["text"]
    assert strings == whole


def test_the_report_is_written_where_it_is_wanted(pair: list[Path], text: Path, tmp_path: Path) -> None:
    found = evaluate(pair, text=text, max_tokens=64, device="cpu", output=tmp_path / "report")
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.json", "report.md", "report.html"}
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == found
    with pytest.raises(Refusal, match=r"report\.json exists") as caught:
        evaluate(pair, text=text, max_tokens=128, device="cpu", output=tmp_path / "report")
    assert caught.value.hint == "give --overwrite, or another --output"
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == found
    again = evaluate(pair, text=text, max_tokens=128, device="cpu", output=tmp_path / "report", overwrite=True)
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == again != found


MISSING = Path("missing.txt")
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"text": MISSING, "context": 1}, "a context of 1 predicts nothing"),  # before a text is read
    ({"text": MISSING, "max_tokens": 1}, "max_tokens is 1; it must be at least 2"),
    ({"text": MISSING, "context": 32}, "cannot read missing.txt"),
    ({"dataset": "wikitxt"}, "no dataset 'wikitxt'"),
    ({"text": MISSING, "dtype": "int8"}, "no KV cache is kept in 'int8'"),
    ({}, "give either a text or a dataset to evaluate on"),
    ({"text": MISSING, "dataset": "wikitext"}, "give either a text or a dataset to evaluate on"),
]


def test_arguments_that_do_not_fit_are_refused(pair: list[Path]) -> None:
    for given, message in WRONG:
        with pytest.raises(KvfoldError) as caught:
            evaluate(pair, **given)
        assert message in str(caught.value)
    with pytest.raises(Refusal, match="there is no model to evaluate"):
        evaluate([], text=MISSING)
    with pytest.raises(Refusal, match="there is no model to measure"):
        bench([])
    with pytest.raises(Refusal, match="no KV cache is kept in 'int8'"):
        bench(pair, context=[8], dtype="int8")


def test_what_a_model_has_no_use_for_is_warned_of(checkpoint: Make, text: Path, warned: Callable[[], list[str]]) -> None:
    path = damage(checkpoint(), lambda tensors: tensors.update({"model.extra": tensors["model.norm.weight"].clone()}))
    evaluate([path], text=text, max_tokens=64, device="cpu")
    assert warned() == ["LlamaForCausalLM has no use for 1 tensors of source: model.extra, …"]


SHORT: dict[str, Any] = {"context": [16], "steps": 1, "rounds": 2, "device": "cpu"}


def test_measurements_are_returned_and_nothing_is_printed(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, int, int, str]] = []
    options = SHORT | {"batch": [1, 2], "output": tmp_path / "speed", "progress": lambda *told: seen.append(told)}
    found = bench([pair[0], str(pair[1])], **options)
    assert [entry["kind"] for entry in found["models"]] == ["GQA-4", "GQA-2"]
    assert [(row["batch"], row["context"]) for row in found["models"][0]["cases"]] == [(1, 16), (2, 16)]
    assert {path.name for path in (tmp_path / "speed").iterdir()} == {"bench.json"}
    assert json.loads((tmp_path / "speed" / "bench.json").read_text()) == found
    assert capsys.readouterr().out == ""
    assert seen == [("bench", done, 8, "round") for done in range(9)]
    with pytest.raises(Refusal, match=r"bench\.json exists") as caught:
        bench(pair[:1], **SHORT, output=tmp_path / "speed")
    assert caught.value.hint == "give --overwrite, or another --output"
    with pytest.raises(Refusal, match="is not a directory that you may write to"):
        bench(pair[:1], **SHORT, output=tmp_path / "speed" / "bench.json" / "deep")
