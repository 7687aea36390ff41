"""The Python API, which `convert eval` and `convert bench` call too: `from eval import evaluate, bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention.errors import Refusal
from eval.inputs.arguments import checked
from eval.inputs.source import Source
from eval.inputs.text import Text, load_dataset, text_of
from eval.terminal.progress import Progress, silent


@checked
def evaluate(
    models: str | Path | Sequence[str | Path],
    *,
    text: str | Path | Sequence[str] | None = None,
    dataset: str | None = None,
    protocol: str = "paper",
    context: int | Sequence[int] | None = (),
    max_tokens: int | None = None,
    recall: bool = False,
    tasks: str | Sequence[str] = (),
    limit: int | None = None,
    task_path: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    output: str | Path | None = None,
    overwrite: bool = False,
    max_perplexity_ratio: float | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure perplexity and KV bytes per token of checkpoints; the first is the source that the others are compared with.

    Args:
        models: A directory or a Hub id, or several.
        text: A UTF-8 file, or a list of strings.
        dataset: Instead of `text`: a named dataset, one of `eval.inputs.text.DATASETS`.
        protocol: One of `eval.quality.protocol.PROTOCOLS`.
        context: Tokens per block, or several to evaluate each; empty for min(2048, the smallest position limit of the models).
        max_tokens: How many tokens to evaluate on, from the text's start; None for all.
        recall: Also measure how well the models copy tokens over distances (`eval.quality.recall`).
        tasks: A task of lm-eval to run, too, or several.
        limit: Examples per task; None for all.
        task_path: A directory with task files of one's own, which can run code.
        dtype: Dtype of the forward passes; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto", "cpu", "cuda", "cuda:1", …
        trust_remote_code: Run Python code that comes with a checkpoint.
        output: A directory for report.json, report.md, report.html and curve.svg.
        overwrite: Replace these files.
        max_perplexity_ratio: Raise `GateMissed` if a model's perplexity exceeds the first's times this ratio.
        progress: Called as `progress(stage, done, total, unit)`.

    Returns:
        The content of report.json: `{"kvfold", "protocol", "models", "other_contexts", "recall", "tasks"}`.

    Raises:
        Refusal: The arguments or the models' configs do not allow it.
        Failure: A model or the text cannot be read, or figures cannot be trusted.
        GateMissed: See `max_perplexity_ratio`; the report is written first.
    """
    from eval.quality.evaluation import check, report_of, require_ratio
    from eval.quality.settings import EvaluationSettings, TaskSettings
    from eval.report import quality as report

    if (text is None) == (dataset is None):
        raise Refusal("give either a text or a dataset to evaluate on", hint="--text FILE or --dataset NAME")
    if not models:
        raise Refusal("there is no model to evaluate")
    sources, ratio = _sources(models, trust_remote_code), max_perplexity_ratio
    if ratio is not None and (len(sources) < 2 or not ratio > 0):
        raise Refusal("--max-perplexity-ratio needs two models or more, and a ratio above 0")
    names = (tasks,) if isinstance(tasks, str) else tuple(dict.fromkeys(tasks))
    wanted = TaskSettings(names, limit, Path(task_path) if task_path is not None else None) if names else None
    if wanted is None and (limit is not None or task_path is not None):
        raise Refusal("--limit and --task-path are of --tasks", hint="name the tasks, or leave these out")
    if limit is not None and limit < 1:
        raise Refusal(f"a limit of {limit} examples leaves none of a task", hint="leave it out for all of them")
    settings = EvaluationSettings(protocol, contexts_of(context), max_tokens, dtype, device, recall, wanted)
    check(sources, settings)  # refuse configs before reading a text
    if output is not None:
        report.require_room(Path(output), report.NAMES, overwrite)
    found = report_of(sources, read_text(text, dataset, "test"), settings, progress=progress)
    if output is not None:
        report.write(found, Path(output))
    require_ratio(found, ratio)
    return found


@checked
def bench(
    models: str | Path | Sequence[str | Path],
    *,
    batch: Sequence[int] = (1,),
    context: Sequence[int] = (),
    steps: int = 20,
    rounds: int = 5,
    stock: bool = False,
    compile: bool = False,
    largest_batch: bool = True,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    output: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Measure speed and memory of checkpoints side by side; the others are compared with the first.

    Args:
        models: A directory or a Hub id, or several.
        batch: Batch sizes; each is measured.
        context: Tokens that a decode step attends over; each is measured. Empty for min(2048, the models' limit).
        steps: Decode steps per round.
        rounds: Rounds per model, batch and context.
        stock: Also measure MLA and GQA models as transformers runs them.
        compile: Run decode steps through torch.compile.
        largest_batch: On a GPU, find it by filling the memory.
        dtype: Dtype of weights and cache; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto", "cpu", "cuda", "cuda:1", …
        trust_remote_code: Run Python code that comes with a checkpoint.
        output: A directory for bench.json, bench.md and bench.svg.
        overwrite: Replace these files.
        progress: Called as `progress(stage, done, total, unit)`.

    Returns:
        The content of bench.json: `{"kvfold", "setup", "models"}`. Units: seconds, bytes, tokens, 10⁹ bytes/s.

    Raises:
        Refusal: The arguments or the models' configs do not allow it.
        Failure: A model cannot be loaded, or there is not enough memory.
    """
    from eval.report import quality as report
    from eval.report import speed as bench_report
    from eval.speed.bench import BenchSettings, run

    if not models:
        raise Refusal("there is no model to measure")
    sources = _sources(models, trust_remote_code)
    if output is not None:
        report.require_room(Path(output), bench_report.NAMES, overwrite)
    sizes = tuple(batch), tuple(context)
    found = run(sources, BenchSettings(*sizes, steps, rounds, dtype, device, compile, stock, largest_batch), progress)
    if output is not None:
        bench_report.write(found, Path(output))
    return found


def _sources(models: str | Path | Sequence[str | Path], trust_remote_code: bool) -> list[Source]:
    named = [models] if isinstance(models, str | Path) else models  # a string is a sequence of its letters, too
    return [Source.parse(str(model), trust_remote_code) for model in named]


def contexts_of(context: int | Sequence[int] | None) -> tuple[int, ...]:
    """The contexts that a caller gives as a number, several or None."""
    return (context,) if isinstance(context, int) else tuple(dict.fromkeys(context or ()))


def read_text(text: str | Path | Sequence[str] | None, dataset: str | None, split: str) -> Text:
    """The text that a caller gives as a file, as strings or by the name of a dataset."""
    return load_dataset(str(dataset), "train" if split == "train" else "test") if text is None else text_of(text)
