"""The tables of a report: one list for Markdown and HTML, so they always agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from eval.terminal.escapes import printable

Model = dict[str, Any]
Report = dict[str, Any]


class Section(NamedTuple):
    """A table of a report.

    Attributes:
        header: One name per column.
        rows: Cells, as many as columns.
        words: The number of columns, from the left, that hold no numbers.
        note: An explanation.
    """

    header: list[str]
    rows: list[list[str]]
    words: int = 1
    note: str = ""


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


# Columns, by their headers: a figure of a model as text.
_Columns = dict[str, Callable[[Model], str]]
_IDENTITY: _Columns = {
    "model": lambda m: m["name"],
    "attention": lambda m: m["kind"],
    "method": lambda m: str(m["method"] or "-"),
}
_QUALITY: _Columns = {
    "perplexity": lambda m: perplexity_text(m["perplexity"]),
    "loss (nats)": lambda m: fixed(m["loss_nats"], "+.4f"),
    "bits/byte": lambda m: f"{m['bits_per_byte']:.3f}",
    # An exact conversion has KL 0; a nearly exact one must look different.
    "KL": lambda m: "<0.0001" if 0 < m["kl_to_source"] < 5e-5 else fixed(m["kl_to_source"]),
    "top-1 agreement": lambda m: f"{m['top1_agreement']:.1%}".replace("%", " %"),
    "acceptance": lambda m: f"{m['acceptance']:.1%}".replace("%", " %"),
}
COLUMNS: _Columns = {
    **_IDENTITY,
    "KV bytes/token": lambda m: f"{m['kv_bytes_per_token']:,.0f}",
    "of source": lambda m: f"{m['cache_ratio']:.2%}".replace("%", " %"),
    **_QUALITY,
}


def sections(report: Report) -> list[Section]:
    """All tables of a report."""
    return [
        _models(report),
        *map(_at_context, report.get("other_contexts", [])),
        *_probes(report.get("probes")),
    ]


def _models(report: Report) -> Section:
    rows = [[printable(cell(model)) for cell in COLUMNS.values()] for model in report["models"]]
    if any(model["path"] != report["models"][0]["path"] for model in report["models"]):
        rows[0][0] += " (source)"
    return Section(list(COLUMNS), rows, len(_IDENTITY))


def _at_context(other: Report) -> Section:
    """The quality at a further context."""
    rows = [[printable(model["name"]), *(cell(model) for cell in _QUALITY.values())] for model in other["models"]]
    return Section([f"at context {other['context']:,}", *_QUALITY], rows)


def _probes(found: list[Model] | None) -> Iterator[Section]:
    """What each model loses at each position, and what it finds again over each distance: a row for each task and model."""
    if not found:
        return
    source, *others = ({(one["task"], one["at"]): one for one in model["found"]} for model in found)
    distances = sorted({at for _, at in source if at is not None})
    columns: list[int | None] = [*distances, None]
    rows = [
        [task, printable(model["name"]), *(_probed(cells.get((task, at)), cells is source) for at in columns)]
        for task in dict.fromkeys(task for task, _ in source)
        for model, cells in zip(found, (source, *others), strict=True)
    ]
    note = (
        "The source: nats. Others: nats over the source ± standard error. In brackets: share of answers that greedy generation "
        f"gives exactly. text: at positions from 0, {distances[1]:,}, … on. copy, key–value: so many tokens after the first "
        "occurrence. four codes, variables: anywhere before."
    )
    yield Section(["probe", "model", *(f"{at:,}" for at in distances), "anywhere"], rows, 2, note)


def _probed(one: Model | None, is_source: bool) -> str:
    if one is None:
        return "-"
    error = "" if is_source or one["standard_error"] is None else f" ± {one['standard_error']:.2f}"
    exact = f" ({one['exact']:.0%})" if "exact" in one else ""
    nats = round(one["nats"], 2) + 0.0  # no figure reads -0.00
    return f"{nats:{'' if is_source else '+'}.2f}{error}{exact}"
