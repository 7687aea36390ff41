"""Renders the results of `eval.speed.bench` as JSON, Markdown and an SVG of step time against context. It measures nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.report.plot import MARKERS, drawn, scale, series_label
from eval.report.quality import write_pages
from eval.terminal.escapes import markdown, printable
from eval.terminal.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = dict[str, Any]
Model = dict[str, Any]
Row = dict[str, Any]
NAMES = ("bench.json", "bench.md", "bench.svg")


class Column(NamedTuple):
    """One column of the table; `cell` returns "" if there is no figure, and a column without any figure is left out."""

    header: str
    numeric: bool
    cell: Callable[[Model, Row], str]


def _rate(value: float | None) -> str:
    """`value` with three significant digits, or more before the point: 0.0123, 4.56, 78.9, 12,345."""
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _times(value: float) -> str:
    return f"{value:.2f} ×"


def _milliseconds(seconds: dict[str, Any]) -> str:
    median, low, high = (_rate(1e3 * seconds[key]) for key in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _peak(row: Row) -> str:
    sizes = row["peak_prefill_bytes"], row["peak_decode_bytes"]
    return "" if None in sizes else " / ".join(_rate(size / 1e9) for size in sizes)


COLUMNS = (
    Column("batch", True, lambda _, row: f"{row['batch']:,}"),
    Column("context", True, lambda _, row: f"{row['context']:,}"),
    Column("model", False, lambda model, _: model["name"]),
    Column("attention", False, lambda model, _: model["kind"]),
    Column("runtime", False, lambda model, row: model["runtime"] + (f", {row['backend']}" if row["backend"] else "")),
    Column("prefill tok/s", True, lambda _, row: _rate(row["prefill_tokens_per_second"])),
    Column("of first", True, lambda _, row: _times(row["prefill_ratio"])),
    Column("decode tok/s", True, lambda _, row: _rate(row["decode_tokens_per_second"])),
    Column("of first", True, lambda _, row: _times(row["decode_ratio"])),
    Column("step, ms", True, lambda _, row: _milliseconds(row["step_seconds"])),
    Column("cache GB/s", True, lambda _, row: _rate(row["cache_gb_per_second"])),
    Column("with weights", True, lambda _, row: _rate(row["weights_and_cache_gb_per_second"])),
    Column("peak GB, prefill / decode", True, lambda _, row: _peak(row)),
    Column("largest batch", True, lambda _, row: "" if row["largest_batch"] is None else f"{row['largest_batch']:,}"),
)


def to_json(report: Report) -> str:
    """The report itself, for scripts."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def to_markdown(report: Report) -> str:
    """One GitHub table, grouped by batch and context, and lines that describe the setup."""
    cases = zip(*([(model, row) for row in model["cases"]] for model in report["models"]), strict=True)
    cells = [[printable(column.cell(*pair)) for column in COLUMNS] for case in cases for pair in case]
    kept = [i for i in range(len(COLUMNS)) if any(row[i] for row in cells)]
    header = [COLUMNS[i].header for i in kept]
    rows = [[row[i] or "-" for i in kept] for row in cells]
    right = [column for column, i in enumerate(kept) if COLUMNS[i].numeric]
    return f"{table(header, rows, right)}\n\n" + "\n\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> list[str]:
    rows = [(model, row) for model in report["models"] for row in model["cases"]]
    lines = [_machine(report), _protocol(report["setup"])]
    dtypes = [f"{model['name']} {model['dtype']}" for model in report["models"]]
    if len({model["dtype"] for model in report["models"]}) > 1:
        lines.append(f"Models ran in different dtypes ({', '.join(dtypes)}), which --dtype makes equal.")
    cut = [f"{model['name']} {row['prefill_chunk']:,}" for model, row in rows if row["prefill_chunk"] < row["context"]]
    if cut:
        lines.append(f"For lack of memory, prefills were cut into chunks of so many tokens: {', '.join(dict.fromkeys(cut))}.")
    lines += [f"A warning: {reason}." for reason in dict.fromkeys(row["backend_reason"] for _, row in rows) if reason]
    for what, key in (("Peak memory", "peak_reason"), ("The largest batch", "largest_batch_reason")):
        lines += [f"{what}: {reason}." for reason in dict.fromkeys(row[key] for _, row in rows) if reason]
    compiled = [
        f"{model['name']} {_rate(row['compile_seconds'])} s" for model, row in rows if row["compile_seconds"] is not None
    ]
    if compiled:
        lines.append(f"First steps, compilation included: {', '.join(compiled)}.")
    return [markdown(line) for line in lines]


def _machine(report: Report) -> str:
    setup, models = report["setup"], report["models"]
    dtypes, attentions = (" and ".join(dict.fromkeys(model[key] for model in models)) for key in ("dtype", "attention"))
    load = "" if setup["load_average"] is None else f", load {setup['load_average']:.1f} before"
    return (
        f"{setup['name']} ({setup['device']}), {_count(setup['cores'], 'core')}, {_count(setup['threads'], 'thread')}{load}; "
        f"torch {setup['torch']}, transformers {setup['transformers']}; {dtypes}, {attentions} attention, "
        f"steps {'compiled' if setup['compile'] else 'not compiled'}."
    )


def _protocol(setup: dict[str, Any]) -> str:
    rounds, steps = _count(setup["rounds"], "round"), _count(setup["steps"], "step")
    turns = {"alternating": "; models took turns", "one after another": "; one model after another", None: ""}
    return (
        f"Medians of {rounds} of one prefill and {steps}, with the least and the largest{turns[setup['order']]}. "
        "A step is one forward pass of one token per sequence, the last of the context. "
        "GB/s: what the cache holds, in the time of a step; with weights: and those that a step reads."
    )


def to_svg(report: Report) -> str:
    """Step time against context: one line per model and batch, with bars from the fastest to the slowest round."""

    def draw(figure: Figure, axes: Axes) -> None:
        _plot(axes, report)
        longest = max(len(label) for label in axes.get_legend_handles_labels()[1])
        figure.legend(loc="outside upper left", ncols=max(1, 760 // (7 * longest + 60)), handlelength=2.5)

    return drawn(draw)


def _plot(axes: Axes, report: Report) -> None:
    models = report["models"]
    batches = sorted({row["batch"] for row in models[0]["cases"]})
    labels = [f"{model['name']}, {model['kind']}, {model['runtime']}" for model in models]
    for (index, model), (nth, batch) in itertools.product(enumerate(models), enumerate(batches)):
        rows = [row for row in model["cases"] if row["batch"] == batch]
        median, low, high = ([1e3 * row["step_seconds"][key] for row in rows] for key in ("median", "min", "max"))
        errors = [[m - x for m, x in zip(median, low, strict=True)], [x - m for m, x in zip(median, high, strict=True)]]
        label = series_label(labels[index] + (f", batch {batch}" if len(batches) > 1 else ""))
        marker, line = MARKERS[nth % len(MARKERS)], ("-", "--", ":", "-.")[nth % 4]
        axes.errorbar([row["context"] for row in rows], median, errors, None, line, color=f"C{index % 10}", marker=marker,
                      capsize=3, label=label)  # fmt: skip
    every = [row for model in models for row in model["cases"]]
    log_x = scale(axes, 0, [row["context"] for row in every])
    log_y = scale(axes, 1, [1e3 * row["step_seconds"][key] for row in every for key in ("min", "max")])
    if not log_y:
        axes.set_ylim(bottom=0)
    setup, title = report["setup"], f"milliseconds per decode step{' (log scale)' if log_y else ''}"
    if len(batches) == 1:
        title += f", batch {batches[0]}"
    axes.set_title(printable(f"{title}; {setup['name']}, {models[0]['dtype']}"), loc="left")
    axes.set_xlabel(f"tokens of context{' (log scale)' if log_x else ''}")


def write(report: Report, directory: Path) -> dict[str, Path]:
    """Writes bench.json, bench.md and bench.svg, each whole or not at all; returns their paths by name."""
    pages = (to_json(report), to_markdown(report), to_svg(report))
    return write_pages(dict(zip(NAMES, pages, strict=True)), directory)
