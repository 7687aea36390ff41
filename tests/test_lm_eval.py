"""lm-eval runs on what `attention.load` gives, as docs/evaluation.md shows, and counts the nats that `eval` counts."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scoring import compare
from transformers import AutoModelForCausalLM, AutoTokenizer
from written import Make

from eval.quality.perplexity import Batch

pytest.importorskip("lm_eval")
PAGE = Path(__file__).parents[1] / "docs" / "evaluation.md"
WORDS = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5
TASK = """
task: hellaswag
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_the_example_runs(checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.evaluator

    checkpoint(name="OUTPUT")
    rows = [{"question": f"{a * n} and ", "choices": [a, "zzzz"], "answer": 0} for n, a in enumerate("abcdef", 1)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "hellaswag.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    manager: Callable[..., Any] = lm_eval.evaluator.TaskManager
    # lm-eval's own thousands of files take ten seconds to index.
    own = manager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr(lm_eval.evaluator, "TaskManager", lambda *_, **__: own)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # asks pip and the compiler, for seconds
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    said: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), said)
    right = said["results"]["hellaswag"]["acc,none"] * len(rows)
    assert right == pytest.approx(round(right))


def test_bits_per_byte_are_those_of_lm_eval_on_the_same_windows(checkpoint: Make) -> None:
    """lm-eval cuts a text into windows of so many tokens to predict, each after the last token of the window before."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    path, text = checkpoint(), WORDS[: 6 * 32]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=32)
    (nats,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]])
    (score,) = compare(model, [], [Batch(ids.unfold(0, 33, 32), 1)])
    assert score.tokens == len(text)
    assert score.nats == pytest.approx(-nats, rel=1e-5)
