"""What the user says of calibration, what a plan makes of it, and the text when it has been read."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import Sources

from attention.errors import Failure, Refusal
from convert.methods import load_grouped, load_latent
from convert.output.companions import write_own_text
from convert.planning.allowed import convertible
from convert.planning.calibration import Calibration, CalibrationOptions, CalibrationText, calibration_for
from convert.planning.texts import texts_of
from eval.inputs.source import Source
from eval.inputs.text import OWN_TEXT as OWN_TEXT_FILE

TEXT = texts_of("some.txt", None)
# Whether they need text: weighted and aligned use it, pca needs it, svd and mean do without.
METHODS = {name: load_latent(name) for name in ("weighted", "svd", "pca")} | {
    name: load_grouped(name) for name in ("aligned", "mean")
}


def decided(source: Source, method: str = "weighted", **options: Any) -> Calibration | None:
    skips = convertible(source).skips
    return calibration_for(source.max_positions, skips, METHODS[method], CalibrationOptions(**options))


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, ""),
        ({"texts": TEXT}, "--text"),
        ({"texts": texts_of(None, "wikitext"), "refit": True, "tokens": 10}, "--calibration-tokens and --dataset and --refit"),
        ({"refit": True, "context": 7}, "--calibration-context and --refit"),
        ({"refit": True}, "--refit"),
    ],
)
def test_options_are_named_as_on_the_command_line(options: dict[str, Any], flags: str) -> None:
    assert CalibrationOptions(**options).flags == flags


@pytest.mark.parametrize(("method", "refit"), [("weighted", True), ("aligned", True), ("pca", False)])
def test_what_is_left_open_depends_on_the_model_and_the_method(method: str, refit: bool, source: Sources) -> None:
    found = decided(source(), method, texts=TEXT)
    healed = None if refit else 0  # the device decides
    expected = Calibration(TEXT, 32768, 128, refit, 128, 128 if refit else None, healed)
    assert found == expected, "blocks are no longer than the model's positions"
    assert decided(source(max_position_embeddings=8192), method, texts=TEXT).context == 2048


OWN_TEXT = texts_of("self", None)


@pytest.mark.parametrize(
    ("limit", "options", "sizes"),
    [
        (8192, {"texts": OWN_TEXT}, (65536, 512, 8192)),
        (1024, {"texts": OWN_TEXT}, (65536, 512, 1024)),
        (128, {"texts": OWN_TEXT}, (65536, 128, 128)),
        (8192, {"texts": OWN_TEXT, "context": 256}, (65536, 256, 8192)),
        (8192, {"texts": OWN_TEXT, "max_context": 512}, (65536, 512, 512)),
        (8192, {"texts": texts_of(["self", Path("some.txt")], None)}, (65536, 512, 8192)),
    ],
)
def test_a_models_own_text_is_many_short_ones(
    limit: int, options: dict[str, Any], sizes: tuple[int, int, int], source: Sources
) -> None:
    found = decided(source(max_position_embeddings=limit), **options)
    assert (found.tokens, found.context, found.max_context) == sizes
    assert decided(source(max_position_embeddings=limit), "pca", texts=OWN_TEXT).max_context in (512, limit)


def test_what_is_said_is_what_is_done(source: Sources) -> None:
    found = decided(source(), texts=TEXT, tokens=500, context=50, refit=False, heal=640)
    assert found == Calibration(TEXT, 500, 50, False, 128, 128, 640)
    assert not found.refit
    for method in ("pca", "svd", "mean"):  # fitted afterwards
        fitted = decided(source(), method, texts=TEXT, refit=True)
        assert fitted.refit
    for method in METHODS:
        assert method == "pca" or decided(source(), method) is None
    shorter = decided(source(), texts=TEXT, context=50, max_context=100)
    assert (shorter.context, shorter.max_context, shorter.retrieval_limit) == (50, 100, 100)
    assert shorter.as_options()["max_context"] == 100


def test_without_skips_a_block_shows_all_distances(source: Sources) -> None:
    windowed = source("mistral", sliding_window=16)
    found = decided(windowed, texts=TEXT, context=50)
    assert (found.max_context, found.retrieval_limit) == (50, 50)
    with pytest.raises(Refusal, match="positions of this model cannot skip, and no block of 50 tokens shows"):
        decided(windowed, texts=TEXT, context=50, max_context=60)


@pytest.mark.parametrize(
    ("method", "options", "message", "hint"),
    [
        ("pca", {}, "method pca needs text to calibrate on", "weighted or svd needs none"),
        ("weighted", {"refit": True}, "--refit is about calibration text, and there is none", "give --text FILE"),
        ("mean", {"tokens": 9, "context": 9}, "--calibration-context and --calibration-tokens are about", "--dataset"),
        ("svd", {"texts": TEXT}, "method svd looks at weights only and has no use for --text", "leave it out"),
        (
            "weighted", {"texts": TEXT, "context": 129}, "context of 129 tokens exceeds the 128 positions of the model",
            "use --calibration-context 128 or less",
        ),
        (
            "weighted", {"texts": TEXT, "context": 64, "tokens": 63}, "63 calibration tokens are less than one block of 64",
            "raise --calibration-tokens",
        ),
        ("weighted", {"texts": TEXT, "tokens": 127}, "127 calibration tokens are less than one block of 128", "raise"),
        ("weighted", {"texts": TEXT, "max_context": 129}, "a --max-context of 129 tokens exceeds the 128 positions of", ""),
        ("pca", {"texts": TEXT, "max_context": 100}, "method pca has no use for --max-context", ""),
        ("weighted", {"max_context": 100}, "--max-context is about calibration text, and there is none", ""),
    ],
)  # fmt: skip
def test_options_that_contradict_the_method_or_the_source_are_refused(
    method: str, options: dict[str, Any], message: str, hint: str, source: Sources
) -> None:
    with pytest.raises(Refusal, match=re.escape(message)) as caught:
        decided(source(), method, **options)
    assert hint in str(caught.value.hint)


def read(source: Source, characters: int, tokens: int, context: int) -> CalibrationText:
    """Of a text with a token for each character."""
    plan = Calibration(texts_of(["ab c" * (characters // 4)], None), tokens, context, False, context)
    return CalibrationText.read(source, plan).with_own(None)


@pytest.mark.parametrize(
    ("characters", "tokens", "context", "shape"),
    [(400, 100, 10, (10, 10)), (400, 109, 10, (10, 10)), (96, 200, 10, (9, 10)), (12, 64, 12, (1, 12))],
)
def test_a_text_is_whole_blocks_from_all_over_it(
    characters: int, tokens: int, context: int, shape: tuple[int, int], source: Sources
) -> None:
    made = source()
    found = read(made, characters, tokens, context)
    rows = found.tokens.blocks(context)
    assert tuple(found.blocks.rows.shape) == tuple(rows.shape) == shape
    assert found.blocks.rows.tolist() == rows.tolist()
    whole = read(made, characters, characters, context).tokens.blocks(context)
    count, of = len(rows), len(whole)
    middles = [(2 * i + 1) * of // (2 * count) for i in range(count)]
    assert rows.tolist() == whole[middles].tolist()
    assert found.calibration.context == context


@pytest.mark.parametrize(("heal", "there", "fitted", "fresh"), [(9, 400, 0, 9), (100, 213, 6, 3), (100, 6, 6, 0)])
def test_a_healing_reads_what_nothing_was_fitted_to(heal: int, there: int, fitted: int, fresh: int, source: Sources) -> None:
    """Of a text of so many blocks, 6 are calibrated on and 204 are for the check. Where others are too few, all are read."""
    text = "".join(random.Random(0).choices("ab c", k=10 * there))
    found = CalibrationText.read(source(), Calibration(texts_of([text], None), 60, 10, False, 10, heal=heal))
    texts = (found.tokens, found.to_heal_on, *found.others)
    calibrated, healed, checked = ({tuple(row) for row in one.blocks(10).tolist()} for one in texts)
    assert (len(healed & calibrated), len(healed - calibrated)) == (fitted, fresh)
    assert (checked == calibrated) if there == 6 else not checked & (healed | calibrated)


def test_several_texts_are_healed_on_alike(source: Sources, tmp_path: Path) -> None:
    """What the model has written before is more than is wanted, and the other text has nothing to spare."""
    write_own_text(tmp_path, torch.arange(300).view(30, 10) % 5 + 3)
    (tmp_path / "text").write_text("ab c" * 10)
    texts = texts_of([tmp_path / OWN_TEXT_FILE, tmp_path / "text"], None)
    plan = Calibration(texts, 60, 10, False, 10, heal=100)
    found = CalibrationText.read(source(), plan).with_own(None)
    assert found.to_heal_on.ids.equal(torch.cat((found.parts[0].ids[30:120], found.parts[1].ids)))
    assert replace(plan, heal=10**9).blocks_to_heal_on == -(-(2**20 + 80) // 20), "more is read again"


def test_a_text_shorter_than_a_block_fails_with_what_fits(source: Sources) -> None:
    with pytest.raises(Failure, match=r"calibration text 1 strings has 8 tokens, fewer than one block of 10") as caught:
        read(source(), 8, 100, 10)
    assert caught.value.hint == "give a longer text, or --calibration-context 8 or less"


def test_a_text_that_is_short_for_the_model_is_remarked(source: Sources) -> None:
    found = read(source(), 400, 400, 10)
    assert found.remarks(50) == []
    (remark,) = found.remarks(51)
    assert remark == (
        "400 tokens of calibration text are few for 51 channels, 408 or more are advised: "
        "correlations between channels are trusted less"
    )
