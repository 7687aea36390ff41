"""The tables of a report, and the chart that belongs to each: one list for Markdown and HTML, so they always agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from eval.report.lines import Lines
from eval.terminal.escapes import printable

Model = dict[str, Any]
Report = dict[str, Any]


_POINTS = 12  # at most, of a curve


class Section(NamedTuple):
    """A table of a report.

    Attributes:
        key: Its id in the HTML page.
        title: Its heading there.
        header: One name per column.
        rows: Cells, as many as columns.
        words: The number of columns, from the left, that hold no numbers.
        note: An explanation.
        plain: Whether Markdown has the note, too.
        chart: What the table shows, drawn.
    """

    key: str
    title: str
    header: list[str]
    rows: list[list[str]]
    words: int = 1
    note: str = ""
    chart: Lines | None = None
    plain: bool = False


class Column(NamedTuple):
    """A column with a figure of each model."""

    header: str
    cell: Callable[[Model], str]


def perplexity_text(value: float) -> str:
    """`value` with four significant digits while that is readable: 5.472, 30.12, 412.6, 8,103, 3.2e+07."""
    if value >= 1e6:
        return f"{value:.2g}"
    return f"{value:,.{max(0, 3 - int(math.log10(value)))}f}" if value >= 1 else f"{value:.3f}"


def fixed(value: float, spec: str = ".4f") -> str:
    """`value` with fixed decimals; one that rounds to zero has no sign, so that no row reads `-0.0000`."""
    return format(value, spec) if round(value, 4) else f"{0:.4f}"


LARGE = 0.25  # nats from which on a loss is said in words, too: perplexity × 1.3
_DOUBLED = math.log(2)  # of the perplexity


def loss_text(nats: float, spec: str = "+.4f") -> str:
    """A loss over the source, and what it means if it is large."""
    return f"{fixed(nats, spec)} nats" + (f" ({meaning(nats)})" if nats >= LARGE else "")


def meaning(nats: float) -> str:
    """What a large loss means."""
    factor = math.exp(min(nats, 700))  # which a float can hold
    return f"perplexity × {factor:.2g}: expect {'text that is hardly of use' if nats >= _DOUBLED else 'worse text'}"


def cache_format(model: Model) -> str:
    """The format that its cache was stored in; "" for a model as it is."""
    return model.get("cache_format") or ""


def _divergence(value: float) -> str:
    # An exact conversion has KL 0; a nearly exact one must look different.
    return "<0.0001" if 0 < value < 5e-5 else fixed(value)


_IDENTITY = (
    Column("model", lambda m: m["name"]),
    Column("attention", lambda m: m["kind"]),
    Column("method", lambda m: str(m["method"] or "-")),
)
_COST = (
    Column("KV bytes/token", lambda m: f"{m['kv_bytes_per_token']:,.0f}"),
    Column("of source", lambda m: f"{m['cache_ratio']:.2%}".replace("%", " %")),
)
_QUALITY = (
    Column("perplexity", lambda m: perplexity_text(m["perplexity"])),
    Column("loss (nats)", lambda m: fixed(m["loss_nats"], "+.4f")),
    Column("bits/byte", lambda m: f"{m['bits_per_byte']:.3f}"),
    Column("KL", lambda m: _divergence(m["kl_to_source"])),
    Column("top-1 agreement", lambda m: f"{m['top1_agreement']:.1%}".replace("%", " %")),
    Column("acceptance", lambda m: f"{m['acceptance']:.1%}".replace("%", " %")),
)
COLUMNS = (*_IDENTITY, *_COST, *_QUALITY)


def sections(report: Report) -> list[Section]:
    """All tables of a report."""
    return [
        _models(report),
        *_by_position(report["models"], report["protocol"]["context"]),
        *(section for other in report.get("other_contexts", []) for section in _at_context(other)),
        *(section for index, model in enumerate(report["models"]) for section in _healing(index, model)),
        *_recall(report.get("recall")),
        *_tasks(report.get("tasks")),
    ]


def _models(report: Report) -> Section:
    note = (
        "Loss is ln(perplexity / source perplexity). KL divergence and top-1 agreement compare each model’s next-token "
        "predictions with the source’s; acceptance is how likely the source accepts a token that the model drafts. Lower is "
        "better, but for these last two."
    )
    rows = [[printable(column.cell(model)) for column in COLUMNS] for model in report["models"]]
    if any(model["path"] != report["models"][0]["path"] for model in report["models"]):
        rows[0][0] += " (source)"
    return Section("models", "Models", [column.header for column in COLUMNS], rows, len(_IDENTITY), note)


def _at_context(other: Report) -> Iterator[Section]:
    """The quality at a further context."""
    context, name = other["context"], _IDENTITY[0]
    header = [f"at context {context:,}", *(column.header for column in _QUALITY)]
    rows = [[printable(column.cell(model)) for column in (name, *_QUALITY)] for model in other["models"]]
    yield Section(f"context-{context}", f"In blocks of {context:,} tokens", header, rows)
    yield from _by_position(other["models"], context)


def _by_position(models: list[Model], context: int) -> Iterator[Section]:
    """The loss of each converted model early and late in its blocks; nothing if there is one bucket."""
    source, *others = models
    ranges = source.get("loss_by_position", [])
    if len(ranges) < 2 or not others:
        return
    header = [
        f"loss (nats) by position, context {context:,}",
        *(f"{one['from']:,} to {one['to'] - 1:,}" for one in ranges),
    ]
    losses = [(printable(model["name"]), [one["loss_nats"] for one in model["loss_by_position"]]) for model in others]
    rows = [[name, *(fixed(loss, "+.4f") for loss in line)] for name, line in losses]
    chart = Lines("loss over the source (nats)", "position in the block, up to", [one["to"] for one in ranges], losses)
    note = "Loss over the source’s on tokens that are predicted at these positions of their blocks."
    yield Section(f"positions-{context}", f"Loss by position, blocks of {context:,}", header, rows, note=note, chart=chart)


def _healing(index: int, model: Model) -> Iterator[Section]:
    """The curve of the healing that made a model; nothing for others, nor again for its rows with caches in formats."""
    points = model.get("healing") or []
    if len(points) < 2 or cache_format(model):
        return
    points = points[:: -(-len(points) // _POINTS)]
    name, tokens = printable(model["name"]), [int(point["tokens"]) for point in points]
    lines = [
        ("KL to the teacher", [point["kl"] for point in points]),
        ("loss over the teacher", [point["loss_nats"] for point in points]),
    ]
    header = [f"healing of {name} (nats)", *(f"{count:,} tokens" for count in tokens)]
    rows = [[label, *(fixed(value) for value in values)] for label, values in lines]
    chart = Lines("on held-out blocks of the training text (nats)", "tokens of training", tokens, lines)
    note = "Measured while it was trained, on blocks that no step saw, which chose the learning rate and the weights. "
    note += "With --top-k, the KL counts the teacher’s largest probabilities only."
    yield Section(f"healing-{index}", f"Healing of {name}", header, rows, note=note, chart=chart)


def _recall(found: Report | None) -> Iterator[Section]:
    """The loss on second copies, over their distances."""
    if found is None:
        return
    distances = [int(distance) for distance in found["pairs"]]
    header = ["loss (nats) on a copy", "the first", *(f"after {distance:,}" for distance in distances)]
    lines = [(printable(model["name"]), [entry["nats"] for entry in model["distances"]]) for model in found["models"]]
    rows = [
        [name, fixed(model["first_nats"], ".3f"), *(fixed(nats, ".3f") for nats in line)]
        for (name, line), model in zip(lines, found["models"], strict=True)
    ]
    chart = Lines("loss on the second copy (nats)", "tokens from a token to its copy", distances, lines)
    note = (
        f"Runs of {found['copy_tokens']} random tokens stand twice in a text, so many tokens apart. "
        "Whoever finds the first copy predicts the second; whoever does not loses as much on it as on the first."
    )
    yield Section("recall", "Recall", header, rows, note=note, chart=chart, plain=True)


def _tasks(found: Report | None) -> Iterator[Section]:
    """Scores of tasks with standard errors; those that test knowledge stand apart."""
    if found is None:
        return
    models = found["models"]
    for knowledge, title in ((False, "Tasks"), (True, "Tasks that test knowledge")):
        rows = [
            [printable(task), printable(metric), *(_score(model["results"][task][metric]) for model in models)]
            for task, metrics in models[0]["results"].items()
            for metric in metrics
            if task.startswith(tuple(found["knowledge"])) == knowledge
        ]
        header = [title.lower(), "metric", *(printable(model["name"]) for model in models)]
        note = (
            f"lm-eval {found['lm_eval']}, {found['limit'] or 'all'} examples a task, prompts of at most "
            f"{found['context']:,} tokens; ± one standard error."
        )
        if rows:
            yield Section("knowledge" if knowledge else "tasks", title, header, rows, words=2, note=note, plain=True)


def _score(result: dict[str, float | None]) -> str:
    error = result["stderr"]
    return f"{result['value']:.4g}" + ("" if error is None else f" ± {error:.2g}")
