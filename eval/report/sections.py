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
        *_by_position(report["models"], report["protocol"]["context"]),
        *(section for other in report.get("other_contexts", []) for section in _at_context(other)),
        *_recall(report.get("recall")),
    ]


def _models(report: Report) -> Section:
    rows = [[printable(cell(model)) for cell in COLUMNS.values()] for model in report["models"]]
    if any(model["path"] != report["models"][0]["path"] for model in report["models"]):
        rows[0][0] += " (source)"
    return Section(list(COLUMNS), rows, len(_IDENTITY))


def _at_context(other: Report) -> Iterator[Section]:
    """The quality at a further context."""
    context = other["context"]
    rows = [[printable(model["name"]), *(cell(model) for cell in _QUALITY.values())] for model in other["models"]]
    yield Section([f"at context {context:,}", *_QUALITY], rows)
    yield from _by_position(other["models"], context)


def _by_position(models: list[Model], context: int) -> Iterator[Section]:
    """The loss of each converted model early and late in its blocks; nothing if there is one bucket."""
    source, *others = models
    ranges = source.get("loss_by_position", [])
    if len(ranges) < 2 or not others:
        return
    spans = [f"{one['from']:,} to {one['to'] - 1:,}" for one in ranges]
    rows = [
        [printable(model["name"]), *(fixed(one["loss_nats"], "+.4f") for one in model["loss_by_position"])] for model in others
    ]
    yield Section([f"loss (nats) by position, context {context:,}", *spans], rows)


def _recall(found: Report | None) -> Iterator[Section]:
    """The loss on second copies, over their distances."""
    if found is None:
        return
    header = ["loss (nats) on a copy", "the first", *(f"after {int(distance):,}" for distance in found["pairs"])]
    rows = [
        [
            printable(model["name"]),
            *(fixed(nats, ".3f") for nats in (model["first_nats"], *(one["nats"] for one in model["distances"]))),
        ]
        for model in found["models"]
    ]
    note = (
        f"Runs of {found['copy_tokens']} random tokens stand twice in a text, so many tokens apart. A model that attends to "
        "the first copy predicts the second; one that cannot loses as much on both."
    )
    yield Section(header, rows, note=note)
