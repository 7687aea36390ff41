"""The work of conversions: what adds to it, and what does not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import same_but_for_the_run

from convert import gqa, mla
from convert.execute import run
from convert.execute.forecast import works_of
from convert.planning.base import Plan
from eval.machine import forecast
from eval.machine.forecast import Machine

Make = Callable[..., Path]
FEW = {"calibration_tokens": 512, "calibration_context": 64}


def slow(name: str, width: int, dtype: str) -> Machine:
    """A machine on which everything takes long, so that everything is announced."""
    return Machine(name, 1e5, 1e4, 1e5, 1e3)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_measured", slow)
    monkeypatch.setattr(forecast, "_SLOW", slow("", 0, ""))


@pytest.fixture
def planned(checkpoint: Make, words: Path, tmp_path: Path) -> Callable[..., Plan]:
    source = checkpoint()

    def plan(convert: Any = gqa, **options: Any) -> Plan:
        given = {"groups": 2} if convert is gqa else {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
        found: Plan = convert(source, tmp_path / "out", dry_run=True, **(given | {"text": words} | FEW | options)).plan
        return found

    return plan


def flops(plan: Plan, tokens: int = 512, evaluated: int = 0) -> float:
    (work,) = works_of([plan], tokens, evaluated)
    return work.flops


def test_every_step_adds_to_the_work(planned: Callable[..., Plan]) -> None:
    plain = planned(refit=False)
    assert flops(planned(groups=4, force=True)) == 0
    assert 0 < flops(plain, 0) < flops(plain) < flops(plain, 1024)
    assert flops(plain) < flops(planned()) < flops(planned(refine=10)) < flops(planned(refine=20))
    assert flops(planned()) == flops(planned(heal=0)) < flops(planned(heal=640)) < flops(planned(heal=1280))
    written, kept = works_of([planned(text="self")] * 2, 512)
    assert kept.flops < written.flops
    assert flops(plain) < flops(plain, evaluated=100) < flops(plain, evaluated=200)
    rounded = planned(refit=False, cache_dtype="int8")
    assert flops(rounded, evaluated=100) - flops(rounded) == 2 * (flops(plain, evaluated=100) - flops(plain))
    assert flops(planned(mla, refit=False)) < flops(planned(mla))
    assert flops(planned(mla, refit=False)) < flops(planned(mla, refit=False, per_layer_ranks=True))


def test_a_refit_through_a_norm_takes_more_fits(checkpoint: Make, words: Path, tmp_path: Path) -> None:
    def refit(model_type: str, kind: str) -> float:
        given: dict[str, Any] = {"groups": 2, "text": words, "output_class": kind, "dry_run": True} | FEW
        source = checkpoint(model_type, model_type)
        with_refit, without = (gqa(source, tmp_path / "out", refit=refit, **given).plan for refit in (True, False))
        return flops(with_refit) - flops(without)

    assert refit("qwen3", "stock") > 2 * refit("llama", "stock")
    assert refit("qwen3", "kvfold") == pytest.approx(refit("llama", "stock"), rel=0.5)


def test_several_conversions_survey_their_source_once(planned: Callable[..., Plan]) -> None:
    plan = planned(mla)
    first, second = works_of([plan, plan], 512)
    assert second.flops < first.flops
    fitted, again = works_of([planned(), planned()], 512)  # which survey nothing
    assert fitted == again


def test_dry_runs_have_the_figure(checkpoint: Make, convert: Any, words: Path, tmp_path: Path, announced: None) -> None:
    arguments = (
        "gqa",
        checkpoint(),
        tmp_path / "out",
        "--groups",
        2,
        "--dry-run",
        "--text",
        words,
        "--calibration-tokens",
        512,
    )
    found = json.loads(convert(*arguments, "--calibration-context", 64, "--json").stdout)
    assert found["expected_seconds"] > 5
    assert "\nwould take about " in convert(*arguments, "--calibration-context", 64).stdout
    evaluated = json.loads(convert(*arguments, "--calibration-context", 64, "--json", "--evaluate", words).stdout)
    assert evaluated["expected_seconds"] > found["expected_seconds"]


def test_a_run_says_once_what_it_takes_and_only_its_run_changes(
    checkpoint: Make,
    words: Path,
    tmp_path: Path,
    announced: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = checkpoint()
    with caplog.at_level(logging.INFO, "kvfold"):
        said = gqa(source, tmp_path / "said", groups=2, text=words, evaluate=words, **FEW)
    assert len([record for record in caplog.records if record.getMessage().startswith("takes about ")]) == 1
    monkeypatch.setattr(run, "foretell_conversion", lambda *given: None)
    silent = gqa(source, tmp_path / "silent", groups=2, text=words, evaluate=words, **FEW)
    assert said.provenance["run"]["expected_seconds"] > 5
    assert silent.provenance["run"]["expected_seconds"] is None
    same_but_for_the_run(tmp_path / "said", tmp_path / "silent")


def test_nothing_is_said_of_a_moment_or_to_who_wants_quiet(
    checkpoint: Make, convert: Any, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = checkpoint(), ("--groups", 2, "--text", words, "--calibration-tokens", 512, "--calibration-context", 64)
    assert "takes about" not in convert("gqa", source, tmp_path / "a", *options).stderr
    monkeypatch.setattr(forecast, "_measured", slow)
    monkeypatch.setattr(forecast, "_SLOW", slow("", 0, ""))
    assert "info: takes about " in convert("gqa", source, tmp_path / "b", *options).stderr
    assert convert("gqa", source, tmp_path / "c", *options, "-q").stderr == ""
