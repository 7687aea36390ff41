"""The check at the end of a conversion, and what a model writes to be calibrated on, from the command line to the files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows import rows
from safetensors.torch import load_file, save_file
from written import same_but_for_the_run, weights

from attention.errors import NotPublished, Refusal
from convert import gqa, mla, mqa, sweep
from convert.calibration import own_text as writing
from convert.execute import checking
from convert.execute.checking import Sample, checked
from eval.inputs.source import Source
from eval.inputs.text import Text, tokenize
from eval.terminal.progress import silent

Make = Callable[..., Path]
Warned = Callable[[], list[str]]
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"calibration_tokens": 512, "calibration_context": 32}
pytestmark = pytest.mark.usefixtures("writing")


def spoil(path: Path) -> None:
    """Make a model sure of the wrong tokens."""
    found = load_file(path / "model.safetensors")
    found["lm_head.weight"] = found["lm_head.weight"].flip(0) * 200
    save_file(found, path / "model.safetensors", {"format": "pt"})


def plan_of(source: Path, **changes: Any) -> Any:
    """As much of a plan as the check reads."""
    method = SimpleNamespace(text="used")
    given = {
        "calibration": None,
        "request": SimpleNamespace(accepts_any_loss=False),
        "seed": 0,
        "target": SimpleNamespace(method=method),
        "rounding": None,
    }
    return SimpleNamespace(source=Source.parse(str(source)), **(given | changes))


def test_losses_are_those_of_the_models(checkpoint: Make, tmp_path: Path, logits: Callable[..., torch.Tensor]) -> None:
    source = checkpoint(tie_word_embeddings=False)
    tokens = tokenize(Text("t", "the quick brown fox " * 20), Source.parse(str(source)).tokenizer())
    sample = Sample.of(tokens, len(tokens.ids))
    found = checked(plan_of(source), checkpoint(name="same", tie_word_embeddings=False), [sample], CPU, tmp_path, silent)
    assert found is not None
    own, given = found["texts"]
    assert (own["text"], own["tokens"], given["text"], given["tokens"]) == ("the source's own text", 8 * 128, "t", 400)
    assert own["loss_nats"] == given["loss_nats"] == 0.0
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        said = AutoModelForCausalLM.from_pretrained(source)(sample.ids).logits[0, :-1].log_softmax(-1)
    assert given["source_nats"] == pytest.approx(-said.gather(1, sample.ids[0, 1:, None]).mean().item(), rel=1e-5)


def test_a_ruined_result_is_kept_back(checkpoint: Make, tmp_path: Path, warned: Warned) -> None:
    source, ruined = checkpoint(tie_word_embeddings=False), checkpoint(name="ruined", tie_word_embeddings=False)
    spoil(ruined)
    with pytest.raises(NotPublished, match=r"of the source's own text, the result loses \d+\.\d\d nats") as caught:
        checked(plan_of(source), ruined, [], CPU, tmp_path, silent)
    assert caught.value.exit_code == 3
    assert "--resume --force" in str(caught.value.hint)
    assert warned() == []
    found = checked(plan_of(source, request=SimpleNamespace(accepts_any_loss=True)), ruined, [], CPU, tmp_path, silent)
    assert found is not None
    assert found["texts"][0]["loss_nats"] > 5
    (said,) = warned()
    assert said.endswith("leave out --no-text, or give --text FILE")


@pytest.mark.parametrize(("loss", "before", "warns", "stops"), [
    (0.2, 2.0, False, False), (0.3, 2.0, True, False), (5.1, 0.1, True, True), (1.1, math.log(331) - 1.0, True, True),
    (0.1, math.log(331), False, False),
])  # fmt: skip
def test_what_is_too_bad(loss: float, before: float, warns: bool, stops: bool, checkpoint: Make, warned: Warned) -> None:
    plan = plan_of(checkpoint(tie_word_embeddings=False))
    found = [{"text": "a", "tokens": 9, "source_nats": before, "loss_nats": loss},
             {"text": "b", "tokens": 9, "source_nats": before, "loss_nats": 0.0}]  # fmt: skip
    if stops:
        with pytest.raises(NotPublished, match="on 9 tokens of a, the result loses"):
            checking._judge(plan, found)
    else:
        checking._judge(plan, found)
        assert bool(warned()) == warns


def test_a_model_beyond_memory_is_not_checked_and_cannot_write(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Warned
) -> None:
    source = checkpoint()
    monkeypatch.setattr("convert.planning.memory.free_memory", lambda device: 1000)
    with pytest.raises(Refusal, match="cannot write its own calibration text: it takes") as caught:
        mqa(source, tmp_path / "out")
    assert "--text FILE; --no-text" in str(caught.value.hint)
    done = mqa(source, tmp_path / "out", no_text=True)
    assert done.provenance["check"] is None
    assert warned()[0].startswith("the result was not compared with its source: it takes ")


# ---- whole conversions ---------------------------------------------------------------------------------------------


def test_without_a_text_the_model_writes_one(checkpoint: Make, tmp_path: Path, convert: Callable[..., Any]) -> None:
    source = checkpoint()
    done = mqa(source, tmp_path / "out", **SIZES)
    assert done.provenance["calibration"]["texts"] == [
        {"text": "its own text", "tokens": 512, "hash": done.provenance["calibration_hash"]}
    ]
    assert done.provenance["recipe"]["mqa"]["text"] == "self"
    assert [one["text"] for one in done.provenance["check"]["texts"]] == ["the source's own text"]
    assert load_file(tmp_path / "out" / "calibration" / "own-text.safetensors")["ids"].shape == (16, 32)
    assert "of the source's own text" in (tmp_path / "out" / "README.md").read_text()
    again = convert("run", tmp_path / "out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    provenance = json.loads((tmp_path / "again" / "conversion.json").read_text())
    assert provenance["recipe"] == done.provenance["recipe"]
    assert provenance["calibration_hash"] == done.provenance["calibration_hash"]
    first, second = weights(tmp_path / "out"), weights(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_repeated_conversion_reads_what_was_written(
    checkpoint: Make, tmp_path: Path, convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint().resolve()
    sizes = ("--kv-lora-rank", 24, "--qk-rope-head-dim", 8, "--calibration-tokens", 512, "--calibration-context", 32)
    assert convert("mla", source, tmp_path / "out", *sizes).exit_code == 0

    def other(*args: Any) -> torch.Tensor:
        raise AssertionError("it is not written again")

    monkeypatch.setattr("convert.execute.inputs.own_text", other)
    again = convert("run", tmp_path / "out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    same_but_for_the_run(tmp_path / "out", tmp_path / "again")
    file = tmp_path / "out" / "calibration" / "own-text.safetensors"
    longer = convert(
        "mqa", source, tmp_path / "more", "--text", file, "--calibration-tokens", 1024, "--calibration-context", 32
    )
    assert longer.exit_code == 1
    assert "holds torch.int32 of shape [16, 32], where 32 rows of 32 tokens" in longer.stderr
    other_ids = {"ids": load_file(file)["ids"].flip(0)}
    for damage in (lambda: save_file(other_ids, file), lambda: file.write_bytes(b"garbage")):
        damage()
        refused = convert("mqa", source, tmp_path / "more", "--text", file, *sizes[4:])
        assert refused.exit_code == 1
        assert f"{file} is not there, damaged, or not what a model wrote" in refused.stderr


def test_several_texts_share_the_tokens(checkpoint: Make, letters: Path, tmp_path: Path, convert: Callable[..., Any]) -> None:
    source, out = checkpoint(), tmp_path / "out"
    common = ("--calibration-tokens", 768, "--calibration-context", 32, "--groups", 2)
    done = convert("gqa", source, out, "--text", "self", "--text", letters, "--text-shares", "1,2", *common)
    assert done.exit_code == 0, done.output
    provenance = json.loads((out / "conversion.json").read_text())
    assert [(one["text"], one["tokens"]) for one in provenance["calibration"]["texts"]] == [
        ("its own text", 256),
        ("text.txt", 512),
    ]
    assert [one["text"] for one in provenance["check"]["texts"]] == ["the source's own text", "text.txt"]
    assert "--text self --text" in (out / "README.md").read_text()
    finished = convert("gqa", source, out, "--text", "self", "--text", letters, "--text-shares", "1,2", *common, "--resume")
    assert "is finished already" in finished.stderr
    other = convert("gqa", source, out, "--text", letters, *common, "--resume")
    assert "made by another command" in other.stderr
    again = gqa(source, tmp_path / "again", groups=2, text={"self": 1, letters: 2}, **SIZES | {"calibration_tokens": 768})
    assert again.provenance["calibration_hash"] == provenance["calibration_hash"]


def test_an_interrupted_writer_goes_on(
    checkpoint: Make, tmp_path: Path, convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint()
    command = ("--calibration-tokens", 512, "--calibration-context", 32)
    assert convert("mqa", source, tmp_path / "whole", *command).exit_code == 0
    write = writing._Writer.written

    def stopped(self: Any, first: int, chances: torch.Tensor) -> torch.Tensor:
        if first:
            raise KeyboardInterrupt
        return write(self, first, chances)

    monkeypatch.setattr(writing, "ROWS", 10)
    with monkeypatch.context() as patch:
        patch.setattr(writing._Writer, "written", stopped)
        assert convert("mqa", source, tmp_path / "out", *command).exit_code == 130
    assert convert("mqa", source, tmp_path / "out", *command, "--resume").exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    "model_type", rows(["gpt2", "opt", "deepseek_v3", "mistral", "qwen3", "bloom"], ["bloom", "deepseek_v3", "gpt2"])
)
def test_every_kind_of_model_is_checked(model_type: str, checkpoint: Make, letters: Path, tmp_path: Path) -> None:
    """Learned positions that end, latents, windows, QK-norm and ALiBi."""
    source = checkpoint(model_type)
    convert, size = (mla, {"kv_budget": "90%"}) if model_type == "deepseek_v3" else (mqa, {})
    done = convert(source, tmp_path / "out", text={"self": 1, letters: 1}, **SIZES, **size, force=True)  # type: ignore[operator]
    assert [one["text"] for one in done.provenance["check"]["texts"]][-1] == "text.txt"


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


def test_other_shares_are_another_conversion(
    checkpoint: Make, tmp_path: Path, convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has one block, whatever its share, so that its hash does not tell."""
    (tmp_path / "short.txt").write_text("forty characters, or a few more than that")
    source, common = checkpoint(), ("--text", "self", "--text", tmp_path / "short.txt", "--calibration-context", 32)
    common += ("--calibration-tokens", 512)

    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("convert.execute.layers.choose", stopped)
        assert convert("mqa", source, tmp_path / "out", *common, "--text-shares", "1,1").exit_code == 130
    other = convert("mqa", source, tmp_path / "out", *common, "--text-shares", "3,1", "--resume")
    assert other.exit_code == 2
    assert "rows_to_write: 8 then, 12 now" in other.stderr
    done = convert("mqa", source, tmp_path / "out", *common, "--text-shares", "1,1", "--resume")
    assert done.exit_code == 0
    assert "short.txt has 32 of the 256 tokens of its share" in done.stderr
    assert (
        "made by another command"
        in convert("mqa", source, tmp_path / "out", *common, "--text-shares", "3,1", "--resume").stderr
    )


def test_force_publishes_what_was_kept_back(
    checkpoint: Make, tmp_path: Path, convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint()
    with monkeypatch.context() as patch:
        for limit in ("_WARN", "_WORST"):
            patch.setattr(checking, limit, -1.0)  # any result is too bad
        refused = convert("mqa", source, tmp_path / "out", "--no-text")
        assert refused.exit_code == 3
        assert "was not published" in refused.stderr
        assert not (tmp_path / "out").exists()
        assert convert("mqa", source, tmp_path / "out", "--no-text", "--resume").exit_code == 3
        forced = convert("mqa", source, tmp_path / "out", "--no-text", "--resume", "--force")
        assert forced.exit_code == 0, forced.output
        assert not (tmp_path / "out.partial").exists()
        assert convert("mqa", source, tmp_path / "named", "--method", "mean").exit_code == 0
        sweep(source, tmp_path / "sweep", groups=[1], methods=["mean"], evaluate=["a text of some words " * 40])
    assert mla(source, tmp_path / "all", kv_budget="100%", no_text=True).output.is_dir()
