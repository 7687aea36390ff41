"""Prints what `eval.speed.bench` has measured: one table, and lines on the machine and the protocol."""

from __future__ import annotations

from typing import Any

from eval.terminal.escapes import markdown, printable
from eval.terminal.tables import bytes_text, table

_HEADER = ("batch", "context", "model", "attention", "runtime", "prefill, ms", "step, ms", "cache", "peak memory")
_NUMBERS = (0, 1, 5, 6, 7, 8)
_PEAK = len(_HEADER) - 1  # which a GPU alone has


def to_markdown(report: dict[str, Any]) -> str:
    """One GitHub table, grouped by batch and context, and lines below it. Rates are medians with both extremes."""
    cases = zip(*([(model, row) for row in model["cases"]] for model in report["models"]), strict=True)
    rows = [_cells(model, row) for case in cases for model, row in case]
    columns = len(_HEADER) if any(row[_PEAK] for row in rows) else _PEAK
    right = [column for column in _NUMBERS if column < columns]
    shown = table(_HEADER[:columns], [row[:columns] for row in rows], right)
    return "\n\n".join([shown, *(markdown(printable(line)) for line in _lines(report))]) + "\n"


def _cells(model: dict[str, Any], row: dict[str, Any]) -> list[str]:
    runtime = model["runtime"] + (f", {row['backend']}" if row["backend"] else "")
    times = [_milliseconds(row[key]) for key in ("prefill_seconds", "step_seconds")]
    peak = "" if row["peak_bytes"] is None else bytes_text(row["peak_bytes"])
    sizes = [f"{row['batch']:,}", f"{row['context']:,}"]
    cells = [*sizes, model["name"], model["kind"], runtime, *times, bytes_text(row["cache_bytes"]), peak]
    return [printable(cell) for cell in cells]


def _milliseconds(seconds: dict[str, Any]) -> str:
    median, low, high = (_three_digits(1e3 * seconds[key]) for key in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def _lines(report: dict[str, Any]) -> list[str]:
    setup, models = report["setup"], report["models"]
    rows = [(model, row) for model in models for row in model["cases"]]
    cut = [f"{model['name']} {row['prefill_chunk']:,}" for model, row in rows if row["prefill_chunk"] < row["context"]]
    lines = [_setup(setup, models)]
    if cut:
        lines.append(f"Prefills were cut into chunks of so many tokens: {', '.join(dict.fromkeys(cut))}.")
    return lines + [f"Warning: {reason}." for reason in dict.fromkeys(row["backend_reason"] for _, row in rows) if reason]


def _setup(setup: dict[str, Any], models: list[dict[str, Any]]) -> str:
    dtypes, attentions = (" and ".join(dict.fromkeys(model[key] for model in models)) for key in ("dtype", "attention"))
    return (
        f"{setup['name']} ({setup['device']}), cores: {setup['cores']}, threads: {setup['threads']}; torch {setup['torch']}, "
        f"transformers {setup['transformers']}; {dtypes}, {attentions} attention. "
        f"Medians (least to most) of rounds: {setup['rounds']}, each of one prefill and steps: {setup['steps']}. A step is a "
        "forward pass of the last token of each sequence."
    )
