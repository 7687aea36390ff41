"""Texts to heal on: what the teacher writes, alone and beside files, written once and read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from written import same_but_for_the_run

from attention.errors import Interrupted
from convert import heal
from convert.calibration import own_text as writing

SIZES: dict[str, Any] = {"tokens": 1280, "context": 16, "batch_tokens": 64, "lr": 3e-3, "device": "cpu"}
OPTIONS = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", value)]
Convert = Callable[..., Any]


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it is not written again")


def test_without_text_the_teacher_writes_it(
    converted: Path, tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    planned = convert("heal", converted, out, *OPTIONS, "--dry-run", "--json")
    assert json.loads(planned.stdout)["passes"] == 1.0
    done = convert("heal", converted, out, *OPTIONS)
    assert done.exit_code == 0, done.output
    provenance = json.loads((out / "conversion.json").read_text())["healing"]
    assert provenance["texts"] == [{"text": "the teacher's own text", "share": 1.0, "hash": None}]
    assert provenance["after"]["kl"] < provenance["before"]["kl"]
    ids = load_file(out / "calibration" / "own-text.safetensors")["ids"]
    assert ids.shape == (91, 16), "80 rows to train on, and an eighth to judge by"
    assert "--text self" in (out / "README.md").read_text()
    monkeypatch.setattr("convert.healing.run.own_text", never)
    finished = convert("heal", converted, out, *OPTIONS, "--resume")
    assert "is finished already" in finished.stderr
    again = convert("run", out, tmp_path / "again")
    assert again.exit_code == 0, again.output
    same_but_for_the_run(out, tmp_path / "again")
    twice = convert("run", tmp_path / "again", tmp_path / "twice")
    assert twice.exit_code == 0, twice.output
    same_but_for_the_run(out, tmp_path / "twice")


def test_stopped_while_it_writes_and_resumed(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ROWS", 16)
    heal(converted, tmp_path / "whole", **SIZES)
    sampled, calls = writing._Writer.written, []

    def stopped(self: Any, first: int, chances: torch.Tensor) -> torch.Tensor:
        calls.append(first)
        if first == 32:
            raise KeyboardInterrupt
        return sampled(self, first, chances)

    with monkeypatch.context() as patch:
        patch.setattr(writing._Writer, "written", stopped)
        with pytest.raises(Interrupted):
            heal(converted, tmp_path / "out", **SIZES)
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            writing._Writer, "written", lambda self, first, chances: calls.append(first) or sampled(self, first, chances)
        )
        heal(converted, tmp_path / "out", resume=True, **SIZES)
    assert calls == [32, 48, 64, 80], "what was written is not written again"
    same_but_for_the_run(tmp_path / "whole", tmp_path / "out")


def test_several_texts_share_the_steps(converted: Path, text: Path, tmp_path: Path, convert: Convert) -> None:
    out, given = tmp_path / "out", ("--text", "self", "--text", text, "--text-shares", "1,3")
    done = convert("heal", converted, out, *OPTIONS, *given)
    assert done.exit_code == 0, done.output
    provenance = json.loads((out / "conversion.json").read_text())
    own, file = provenance["healing"]["texts"]
    assert (own["share"], own["hash"], file["text"], file["share"]) == (1.0, None, "train.txt", 3.0)
    assert provenance["healing"]["text"] == "the teacher's own text and train.txt"
    written = load_file(out / "calibration" / "own-text.safetensors")["ids"]
    assert len(written) == 22, "a quarter of 80, and an eighth to judge by"
    assert "is finished already" in convert("heal", converted, out, *OPTIONS, *given, "--resume").stderr
    (tmp_path / "other.txt").write_text("another text " * 100)
    other = convert("heal", converted, out, *OPTIONS, *given[:3], tmp_path / "other.txt", *given[4:], "--resume")
    assert "was made by another command, or of others" in other.stderr
    for others in (("--text", "self", "--text", text, "--text-shares", "3,1"), ("--text", text, "--text", "self")):
        done = convert("heal", converted, out, *OPTIONS, *others, "--resume")
        assert done.exit_code == 2, "other shares, another order"
    again = heal(converted, tmp_path / "again", text={"self": 1, text: 3}, **SIZES)
    assert again.provenance["healing"]["text_hash"] == provenance["healing"]["text_hash"]
