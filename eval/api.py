"""What `convert eval` and `convert bench` call, and programs may: `from eval import evaluate, bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention.errors import Refusal
from eval.progress import Progress, silent
from eval.source import Source
from eval.text import Text, load_dataset, text_of


def evaluate(
    models: Sequence[str | Path],
    *,
    text: str | Path | Sequence[str] | None = None,
    dataset: str | None = None,
    protocol: str = "paper",
    context: int | None = None,
    max_tokens: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    output: str | Path | None = None,
    max_perplexity_ratio: float | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Perplexity and KV bytes per token of checkpoints, the first being what the others are compared with.

    Args:
        models: Directories or Hub ids.
        text: A UTF-8 file, or a list of strings.
        dataset: Or a named text, one of `eval.text.DATASETS`.
        protocol: One of `eval.protocol.PROTOCOLS`.
        context: Tokens per block; None for min(2048, the smallest position limit of the models).
        max_tokens: Evaluate on so many tokens from the text's start; None for all.
        dtype: Arithmetic of the forward passes; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto", "cpu", "cuda", "cuda:1", …
        trust_remote_code: Run Python code that comes with a checkpoint.
        output: Write report.json, report.md and report.html there.
        max_perplexity_ratio: Raise `GateMissed` if a model's perplexity exceeds so many times the first's.
        progress: Called as `progress(stage, done, total, unit)`.

    Returns:
        The report, as report.json holds it: `{"kvfold", "protocol", "models"}`.

    Raises:
        Refusal: The arguments or the models' configs do not allow it.
        Failure: A model or the text cannot be read, or figures cannot be trusted.
        GateMissed: See `max_perplexity_ratio`; the report has been written by then.
    """
    from eval import report
    from eval.evaluation import EvaluationSettings, check, report_of, require_ratio

    if (text is None) == (dataset is None):
        raise Refusal("give either a text or a dataset to evaluate on", hint="--text FILE or --dataset NAME")
    if not models:
        raise Refusal("there is no model to evaluate")
    limit = max_perplexity_ratio
    if limit is not None and (len(models) < 2 or not limit > 0):
        raise Refusal("--max-perplexity-ratio needs two models or more, and a ratio above 0")
    sources = [Source.parse(str(model), trust_remote_code) for model in models]
    settings = EvaluationSettings(protocol, context, max_tokens, dtype, device)
    check(sources, settings)  # configs are refused before a text is read
    found = report_of(sources, read_text(text, dataset, "test"), settings, progress=progress)
    if output is not None:
        report.write(found, Path(output))
    require_ratio(found, limit)
    return found


def bench(
    models: Sequence[str | Path],
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
    """Speed and memory of checkpoints side by side, the first being what the others are compared with.

    Args:
        models: Directories or Hub ids.
        batch: Sequences at once; each is measured.
        context: Tokens that a decode step attends over; empty for min(2048, the smallest position limit of the models).
        steps: Decode steps per round.
        rounds: Of each model, batch and context.
        stock: Measure MLA and GQA models as transformers runs them, too.
        compile: Run decode steps through torch.compile.
        largest_batch: On a GPU, find it, by filling its memory.
        dtype: Of weights and cache; "auto" is float32 on a CPU, the checkpoint's own dtype elsewhere.
        device: "auto", "cpu", "cuda", "cuda:1", …
        trust_remote_code: Run Python code that comes with a checkpoint.
        output: Write bench.json, bench.md and bench.svg there.
        overwrite: Replace those.
        progress: Called as `progress(stage, done, total, unit)`.

    Returns:
        The measurements, as bench.json holds them: `{"kvfold", "setup", "models"}`. Seconds, bytes, tokens, 10⁹ bytes/s.

    Raises:
        Refusal: The arguments or the models' configs do not allow it.
        Failure: A model cannot be loaded, or memory does not suffice.
    """
    from eval import bench_report
    from eval.speed import BenchSettings, run

    if not models:
        raise Refusal("there is no model to measure")
    sources = [Source.parse(str(model), trust_remote_code) for model in models]
    if output is not None:
        bench_report.require_room(Path(output), overwrite)
    sizes = tuple(batch), tuple(context)
    found = run(sources, BenchSettings(*sizes, steps, rounds, dtype, device, compile, stock, largest_batch), progress)
    if output is not None:
        bench_report.write(found, Path(output))
    return found


def read_text(text: str | Path | Sequence[str] | None, dataset: str | None, split: str) -> Text:
    """The text that a caller named, by a file, by its words or by a dataset."""
    return load_dataset(str(dataset), "train" if split == "train" else "test") if text is None else text_of(text)
