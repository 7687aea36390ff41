"""The Python API, which `convert eval` and `convert bench` call too: `from eval import evaluate, bench`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from attention.errors import Refusal
from eval import options
from eval.arguments import checked
from eval.inputs.source import Source
from eval.inputs.text import load_dataset, text_of
from eval.quality.evaluation import check, report_of
from eval.quality.settings import EvaluationSettings
from eval.report import quality as report
from eval.speed.bench import BenchSettings, run


@checked
def evaluate(models: str | Path | Sequence[str | Path], **given: Unpack[options.Evaluate]) -> dict[str, Any]:
    """Measure perplexity and KV bytes per token of checkpoints; the first is the source that the others are compared with.

    Args:
        models: A directory or a Hub id, or several.
        **given: The options, in `eval.options`.

    Returns:
        The content of report.json: `{"kvfold", "protocol", "models", "other_contexts", "probes"}`.

    Raises:
        Refusal: The arguments or the models' configs do not allow it.
        Failure: A model or the text cannot be read, or figures cannot be trusted.
    """
    text, dataset, output = given["text"], given["dataset"], given["output"]
    contexts: Any = given["context"] or ()
    if (text is None) == (dataset is None):
        raise Refusal("give either a text or a dataset to evaluate on", hint="--text FILE or --dataset NAME")
    sources = _sources(models, given["trust_remote_code"], "evaluate")
    settings = EvaluationSettings(
        protocol=given["protocol"],
        contexts=tuple(map(int, contexts)),
        max_tokens=given["max_tokens"],
        dtype=given["dtype"],
        device=given["device"],
        probes=not given["no_probes"],
        cache_dtypes=tuple(given["cache_dtype"]),
    )
    check(sources, settings)  # refuse configs before reading a text
    if output is not None:
        report.require_room(Path(output), report.NAMES, given["overwrite"])
    found = report_of(
        sources, text_of(text) if text is not None else load_dataset(str(dataset), "test"), settings, progress=given["progress"]
    )
    if output is not None:
        report.write(found, Path(output))
    return found


@checked
def bench(models: str | Path | Sequence[str | Path], **given: Unpack[options.Bench]) -> dict[str, Any]:
    """Measure speed and memory of checkpoints side by side.

    Args:
        models: A directory or a Hub id, or several.
        **given: The options, in `eval.options`.

    Returns:
        The content of bench.json: `{"kvfold", "setup", "models"}`. Units: seconds, bytes, tokens.

    Raises:
        Refusal: The arguments or the models' configs do not allow it.
        Failure: A model cannot be loaded, or there is not enough memory.
    """
    sources, output = _sources(models, given["trust_remote_code"], "measure"), given["output"]
    if output is not None:
        report.require_room(Path(output), ("bench.json",), given["overwrite"])
    settings = BenchSettings(
        batches=tuple(given["batch"]),
        contexts=tuple(map(int, given["context"])),
        steps=given["steps"],
        rounds=given["rounds"],
        dtype=given["dtype"],
        device=given["device"],
        stock=given["stock"],
    )
    found = run(sources, settings, given["progress"])
    if output is not None:
        report.write_pages({"bench.json": json.dumps(found, indent=2, allow_nan=False) + "\n"}, Path(output))
    return found


def _sources(models: str | Path | Sequence[str | Path], trust_remote_code: bool, verb: str) -> list[Source]:
    if not models:
        raise Refusal(f"there is no model to {verb}")
    named = [models] if isinstance(models, str | Path) else models  # a string is a sequence of its letters, too
    return [Source.parse(str(model), trust_remote_code) for model in named]
