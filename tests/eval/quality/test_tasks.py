"""Tasks of lm-eval from a local file: known answers, what is refused, and what reaches the report."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scoring import compare
from tiny import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from written import Make

from attention.errors import Failure, Refusal
from eval import evaluate
from eval.quality import tasks
from eval.quality.protocol import Block
from eval.quality.tasks import _figures

WORDS = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{more}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a task of choices and one of generation."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    import lm_eval.tasks  # here, because it takes seconds that workers without these tests need not spend

    manager = lm_eval.tasks.TaskManager
    # lm-eval's own thousands of files take ten seconds to index.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_path, include_defaults: manager(None, include_path, False))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # asks pip and the compiler, for seconds
    (tmp_path / "tasks").mkdir()
    data = tmp_path / "tasks" / "data.jsonl"
    rows = [{"question": f"{a * n} and ", "choices": [a, "zzzz"], "answer": 0} for n, a in enumerate("abcdef", 1)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    choices = (
        'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"
    )
    words = (
        'doc_to_target: "{{choices[0]}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 3}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"
    )
    for name, kind, more in (("mmlu_letters", "multiple_choice", choices), ("words", "generate_until", words)):
        text = TASK.format(name=name, data=data, kind=kind, more=more)
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "tasks"


def test_tasks_are_run_side_by_side_with_standard_errors(
    checkpoint: Make, own: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], warned: Callable[[], list[str]]
) -> None:
    latent = tmp_path / "latent"
    tiny_model(tiny_config("deepseek_v3")).save_pretrained(latent)
    capfd.readouterr()
    names = ("words", "mmlu_letters")
    found = evaluate([checkpoint(), latent], text=[WORDS], context=32, device="cpu", tasks=names, task_path=own, limit=5,
                     output=tmp_path / "report")  # fmt: skip
    assert f"the task files in {own} can run code, and so can what lies beside them" in warned()
    part = found["tasks"]
    assert (part["limit"], part["knowledge"][0]) == (5, "mmlu")
    assert [model["name"] for model in part["models"]] == ["source", "latent"]
    for model in part["models"]:
        results = model["results"]
        assert list(results) == list(names)
        right = results["mmlu_letters"]["acc"]["value"] * 5
        assert right == pytest.approx(round(right)), "a mean over the first five"
        share = right / 5
        assert results["mmlu_letters"]["acc"]["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 4))
        assert set(results["words"]) == {"exact_match"}
    markdown = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "| tasks " in markdown
    assert "| tasks that test knowledge " in markdown
    assert "fatal" not in capfd.readouterr().err, "git's complaints are not ours"


def test_a_model_whose_logits_are_not_finite_gets_no_score(
    checkpoint: Make, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint()
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"][4] = math.inf
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(
        "eval.quality.evaluation.score_all", lambda jobs, sources, opened, visit, progress: visits(opened, visit)
    )
    with pytest.raises(Failure, match="are not finite in float32"):
        evaluate(path, text=[WORDS], context=32, device="cpu", tasks=["mmlu_letters"], task_path=own)


def visits(opened: Any, visit: Any) -> None:
    with opened(0) as model, torch.inference_mode():
        visit(0, model)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(Failure, match=f"acc of arc is {value} for a-model"):
        _figures("arc", {"alias": "arc", "acc,none": value, "acc_stderr,none": 0.1}, "a-model")


def test_metrics_after_filters_keep_their_names() -> None:
    result = {"alias": "x", "sample_len": 5, "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A", "acc,none": 1}
    assert _figures("x", result, "m") == {
        "exact_match (strict)": {"value": 0.5, "stderr": None},
        "acc": {"value": 1.0, "stderr": None},
    }


def test_missing_data_and_wrong_limits_end_before_models_are_loaded(checkpoint: Make, own: Path) -> None:
    path = checkpoint()
    (path / "model.safetensors").write_bytes(b"no weights")

    def run(*names: str, **more: Any) -> None:
        evaluate(path, text=[WORDS], context=32, device="cpu", tasks=names, **more)

    (own / "away.yaml").write_text(TASK.format(name="away", data=own / "none.jsonl", kind="generate_until", more=""))
    with pytest.raises(Failure, match=r"cannot load the task away of lm-eval: .*none\.jsonl"):
        run("away", task_path=own)
    with pytest.raises(Refusal, match="--limit and --task-path are of --tasks"):
        run(limit=3)
    with pytest.raises(Refusal, match="limit is 0; it must be at least 1"):
        run("away", limit=0, task_path=own)


def test_bits_per_byte_are_those_of_lm_eval_on_the_same_windows(checkpoint: Make) -> None:
    """lm-eval cuts a text into windows of so many tokens to predict, each after the last token of the window before."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    path, text = checkpoint(), WORDS[: 6 * 32]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=32)
    (nats,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]])
    windows = [Block(ids[start : start + 33], 1) for start in range(0, len(text), 32)]
    (score,) = compare(model, [], windows)
    assert score.tokens == len(text)
    assert score.nats == pytest.approx(-nats, rel=1e-5)


def test_a_name_for_several_tasks_gives_an_entry_for_each() -> None:
    every = {"arc_easy": {"acc,none": 0.5}, "arc_hard": {"acc,none": 0.25}, "arc": {"alias": "arc", " ": " "}}
    assert list(tasks._results("arc", every, "m")) == ["arc_easy", "arc_hard"]
    assert list(tasks._results("arc_hard", every, "m")) == ["arc_hard"]
    with pytest.raises(Failure, match="the task x of lm-eval gave no figures for m"):
        tasks._results("x", {"x": {"alias": "x"}}, "m")


def test_an_error_within_lm_eval_is_one_line(checkpoint: Make, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TASK.format(name="broken", data=own / "data.jsonl", kind="generate_until", more='doc_to_target: "{{nothing}}"')
    (own / "broken.yaml").write_text(text.replace("question", "no such column"), encoding="utf-8")
    with pytest.raises(Failure, match=r"cannot (run|load) the task broken of lm-eval"):
        evaluate(checkpoint(), text=[WORDS], context=32, device="cpu", tasks="broken", task_path=own)


def test_a_name_that_nobody_knows_is_refused(own: Path) -> None:
    known = type("Manager", (), {"__init__": lambda self, include_path, include_defaults: None, "all_tasks": ["arc"]})
    with pytest.raises(Refusal, match=f"no task 'nix' in lm-eval .* or {own}"):
        tasks._manager(known, tasks.TaskSettings(("arc", "nix"), None, own))


def test_without_lm_eval_the_extra_is_named(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(Failure, match="--tasks needs the package lm-eval") as caught:
        evaluate(checkpoint(), text=[WORDS], device="cpu", tasks=["arc_easy"])
    assert caught.value.hint == "pip install 'kvfold[harness]'"
