"""The check at the end of a conversion, and what a model writes to be calibrated on, from the command line to the files."""

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from written import Convert, Find, Make, damage, ok, read, refused, same_but_for_the_run

from attention.errors import NotPublished, Refusal
from convert import gqa, mqa, sweep
from convert.calibration import own_text as writing
from convert.execute import checking
from convert.execute.checking import Sample, checked
from eval.inputs.source import Source
from eval.inputs.text import Text, tokenize
from eval.quality.opened import Opened
from eval.terminal.progress import silent

Warned = Callable[[], list[str]]
SIZES: dict[str, Any] = {"calibration_tokens": 512, "calibration_context": 32}
pytestmark = pytest.mark.usefixtures("writing")


@pytest.fixture
def opened() -> Iterator[Opened]:
    with Opened() as models:
        yield models


def plan_of(source: Path, **changes: Any) -> Any:
    """As much of a plan as the check reads."""
    target = SimpleNamespace(method=SimpleNamespace(text="used"), rounding=None)
    given = {
        "calibration": None,
        "accepts_any_loss": False,
        "seed": 0,
        "target": target,
        "runs_on": torch.device("cpu"),
    } | changes
    return SimpleNamespace(source=Source.parse(str(source)), **given)


def test_losses_are_those_of_the_models(checkpoint: Make, tmp_path: Path, opened: Opened) -> None:
    source = checkpoint(tie_word_embeddings=False)
    tokens = tokenize(Text("t", "the quick brown fox " * 20), Source.parse(str(source)).tokenizer())
    sample = Sample.of(tokens, len(tokens.ids))
    found = checked(plan_of(source), checkpoint(name="same", tie_word_embeddings=False), [sample], tmp_path, silent, opened)
    own, given = found["texts"]
    assert (own["text"], own["tokens"], given["text"], given["tokens"]) == ("the source's own text", 8 * 128, "t", 400)
    assert own["loss_nats"] == given["loss_nats"] == 0.0
    with torch.inference_mode():
        said = AutoModelForCausalLM.from_pretrained(source)(sample.ids).logits[0, :-1].log_softmax(-1)
    assert given["source_nats"] == pytest.approx(-said.gather(1, sample.ids[0, 1:, None]).mean().item(), rel=1e-5)


def test_far_positions_are_checked_where_positions_skip(checkpoint: Make, tmp_path: Path, opened: Opened) -> None:
    source = checkpoint(max_position_embeddings=4096)
    plan = plan_of(source, calibration=SimpleNamespace(skips_to=4096, texts=()))
    found = checked(plan, checkpoint(name="same", max_position_embeddings=4096), [], tmp_path, silent, opened)
    own, copies, late = found["texts"]
    assert copies["text"] == "copies 1,280 tokens later (positions skip)"
    assert late["text"] == "the source's own text from position 3,072 on (positions skip)"
    assert [one["loss_nats"] for one in (own, copies, late)] == [0, 0, 0]
    rows = torch.arange(2 * 128).view(2, 128)
    again, far = Sample.far(rows, 4096)  # 256 tokens of text, and 64 that stand before and after it
    assert torch.equal(again.ids[0, :64], again.ids[0, 320:])
    assert torch.equal(again.ids[0, 64:320], rows.flatten())
    assert again.positions[:320].tolist() == list(range(320))
    assert again.positions[320:].tolist() == list(range(1024, 1088))
    assert far.positions.tolist() == [0, *range(3073, 3200)]
    assert Sample.far(rows, 511) == []
    ids, places = torch.randint(3, 90, (1, 64)), torch.arange(64) + 3000 * (torch.arange(64) > 30)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    expected = model(ids, position_ids=places[None], attention_mask=torch.ones_like(ids)).logits[0, :-1].log_softmax(-1)
    (loss,) = checking._losses(model, [Sample("t", ids, 1, places)], model.config.vocab_size, lambda _: None)
    assert loss == pytest.approx(-expected.gather(1, ids[0, 1:, None]).mean().item(), rel=1e-5)


def test_a_ruined_result_is_kept_back(checkpoint: Make, tmp_path: Path, warned: Warned, opened: Opened) -> None:
    source, ruined = checkpoint(tie_word_embeddings=False), checkpoint(name="ruined", tie_word_embeddings=False)
    head = "lm_head.weight"  # which is sure of the wrong tokens
    damage(ruined, lambda tensors: tensors.update({head: tensors[head].flip(0) * 200}))
    with pytest.raises(NotPublished, match=r"of the source's own text, the result loses \d+\.\d\d nats") as caught:
        checked(plan_of(source), ruined, [], tmp_path, silent, opened)
    assert caught.value.exit_code == 3
    assert "--resume --force" in str(caught.value.hint)
    assert warned() == []
    found = checked(plan_of(source, accepts_any_loss=True), ruined, [], tmp_path, silent, opened)
    assert found["texts"][0]["loss_nats"] > 5
    (said,) = warned()
    assert said.endswith("leave out --no-text, or give --text FILE")


@pytest.mark.parametrize(("loss", "before", "warns", "stops"), [
    (0.2, 2.0, False, False), (0.3, 2.0, True, False), (5.1, 0.1, True, True), (1.1, math.log(331) - 1.0, True, True),
    (0.1, math.log(331), False, False),
])  # fmt: skip
def test_what_is_too_bad(loss: float, before: float, warns: bool, stops: bool, warned: Warned) -> None:
    found = [{"text": "a", "tokens": 9, "source_nats": before, "loss_nats": loss},
             {"text": "b", "tokens": 9, "source_nats": before, "loss_nats": 0.0}]  # fmt: skip
    if stops:
        with pytest.raises(NotPublished, match="on 9 tokens of a, the result loses"):
            checking._judge(found, 331, False, "do better")
    else:
        checking._judge(found, 331, False, "do better")
        assert bool(warned()) == warns


def test_a_model_beyond_memory_is_not_checked_and_cannot_write(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Warned
) -> None:
    source = checkpoint()
    monkeypatch.setattr("convert.planning.base.free_memory", lambda device: 1000)
    with pytest.raises(Refusal, match="cannot write its own calibration text: it takes") as caught:
        mqa(source, tmp_path / "out")
    assert "--text FILE; --no-text" in str(caught.value.hint)
    done = mqa(source, tmp_path / "out", no_text=True)
    assert done.provenance["check"] is None
    assert warned()[0].startswith("the result was not compared with its source: it takes ")


def test_without_a_text_the_model_writes_one(finished: Find) -> None:
    made = finished("own text")
    text = {"text": "its own text", "tokens": 512, "hash": made.provenance["calibration_hash"]}
    assert made.provenance["calibration"]["texts"] == [text]
    assert made.provenance["recipe"]["mqa"]["text"] == "self"
    assert [one["text"] for one in made.provenance["check"]["texts"]] == ["the source's own text"]
    assert load_file(made.path / "calibration" / "own-text.safetensors")["ids"].shape == (16, 32)
    assert "of the source's own text" in made.card


def test_a_repeated_conversion_reads_what_was_written(
    finished: Find, tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(source: Source, rows: int, *how: Any, **more: Any) -> torch.Tensor:
        assert rows == checking.OWN_ROWS, "the text of the calibration is not written again"
        return writing.own_text(source, rows, *how, **more)

    made = finished("own text")
    monkeypatch.setattr("convert.execute.checking.own_text", other)
    ok(convert("run", made.path, tmp_path / "again"))
    same_but_for_the_run(made.path, tmp_path / "again")
    shutil.copytree(made.path / "calibration", tmp_path / "calibration")
    file = tmp_path / "calibration" / "own-text.safetensors"
    command = ("mqa", made.source, tmp_path / "more", "--text", file, "--calibration-context", 32, "--calibration-tokens")
    refused(convert(*command, 1024), 1, "holds torch.int32 of shape [16, 32], where 32 rows of 32 tokens")
    other_ids = {"ids": load_file(file)["ids"].flip(0)}
    for change in (lambda: save_file(other_ids, file), lambda: file.write_bytes(b"garbage")):
        change()
        refused(convert(*command, 512), 1, f"{file} is not there, damaged, or not what a model wrote")


def test_several_texts_share_the_tokens(shelf: Make, letters: Path, tmp_path: Path, convert: Convert) -> None:
    command = ("gqa", shelf(), tmp_path / "out", "--groups", 2, "--calibration-tokens", 768, "--calibration-context", 32)
    shares = ("--text", "self", "--text", letters)
    ok(convert(*command, *shares))
    provenance = read(tmp_path / "out" / "conversion.json")
    texts = [(one["text"], one["tokens"]) for one in provenance["calibration"]["texts"]]
    assert texts == [("its own text", 384), ("text.txt", 384)]
    assert [one["text"] for one in provenance["check"]["texts"]] == ["the source's own text", "text.txt"]
    assert "--text self --text" in (tmp_path / "out" / "README.md").read_text()
    assert "is finished already" in convert(*command, *shares, "--resume").stderr
    refused(convert(*command, "--text", letters, "--resume"), 2, "made by another command")
    again = gqa(shelf(), tmp_path / "out", groups=2, text=["self", letters], **SIZES | {"calibration_tokens": 768}, resume=True)
    assert again.provenance == provenance


def test_a_source_that_cannot_write_does_not_keep_a_result_back(
    checkpoint: Make, letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Warned
) -> None:
    source = checkpoint()
    monkeypatch.setattr(writing, "_LEAST_WORDS", 1e9)
    done = mqa(source, tmp_path / "plain", no_text=True)
    assert done.provenance["check"] is None
    assert warned()[0].startswith("the result was not checked on text of its source, which does not write: ")
    given = mqa(source, tmp_path / "given", text=letters, **SIZES)
    assert [one["text"] for one in given.provenance["check"]["texts"]] == ["text.txt"]


def test_force_publishes_what_was_kept_back(
    shelf: Make, tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a method that the user has named, and a sweep; a copy is not checked."""
    for limit in ("_WARN", "_WORST"):
        monkeypatch.setattr(checking, limit, -1.0)  # any result is too bad
    command = ("mqa", shelf(), tmp_path / "out", "--no-text")
    refused(convert(*command), 3, "was not published")
    assert not (tmp_path / "out").exists()
    refused(convert(*command, "--resume"), 3, "was not published")
    ok(convert(*command, "--resume", "--force"))
    assert not (tmp_path / "out.partial").exists()
    ok(convert("mqa", shelf(), tmp_path / "named", "--method", "mean"))
    sweep(shelf(), tmp_path / "sweep", groups=[1], methods=["mean"], evaluate=["a text of some words " * 40])
    assert gqa(shelf(), tmp_path / "copy", groups=4, force=True).provenance["check"] is None
