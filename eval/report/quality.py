"""Renders a report (`eval.evaluate` returns one) as JSON, Markdown and one self-contained HTML page.

A report is a plain dict; this module measures nothing and loads neither models nor tokenizers. Its tables are made in
`eval.report.sections`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from attention.errors import Failure, Refusal
from eval.inputs.overlap import WARN_ABOVE
from eval.report import curve
from eval.report.sections import LARGE, cache_format, fixed, loss_text, perplexity_text, sections
from eval.terminal.escapes import markdown, printable
from eval.terminal.tables import table

Model = dict[str, Any]
Report = dict[str, Any]

NAMES = ("report.json", "report.md", "report.html", "curve.svg")
_CURVE = (760, 440)  # pixels of the curve at its largest


def to_json(report: Report) -> str:
    """The report itself, for scripts. Raises `Failure` on a number that JSON cannot hold."""
    fields = [("the protocol", report["protocol"])]
    fields += [(f'model "{printable(model["name"])}"', model) for model in report["models"]]
    fields += [("the report", {key: value for key, value in report.items() if key not in ("protocol", "models")})]
    for owner, key, value in ((owner, key, value) for owner, items in fields for key, value in items.items()):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise Failure(
                f"cannot write the report: {key} of {owner} is {value}, but every number must be finite",
                hint="overflowing or NaN logits cause this: evaluate with --dtype float32; if it remains, convert again",
            ) from None
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def to_markdown(report: Report) -> str:
    """GitHub tables and one line with the protocol; cells are padded, so that it is readable on a terminal."""
    parts = []
    for part in sections(report):
        parts.append(table(part.header, part.rows, range(part.words, len(part.header))))
        parts += [markdown(part.note)] if part.plain else []
    return "\n\n".join([*parts, _protocol_line(report), *map(markdown, _warnings(report))]) + "\n"


def _warnings(report: Report) -> list[str]:
    """What to know before the figures are believed, a sentence each."""
    context = max([report["protocol"]["context"], *(other["context"] for other in report.get("other_contexts", []))])
    flattered = [
        f"Warning: {model['name']} was calibrated on text that holds {100 * overlap:.3g} % of this one, "
        "which flatters its figures."
        for model in report["models"]
        if (overlap := model.get("calibration_overlap") or 0.0) > WARN_ABOVE
    ]
    beyond = [
        f"Warning: {model['name']} was calibrated for contexts of {shorter:,} tokens, and is evaluated on {context:,}: "
        "it may lose more at later positions."
        for model in report["models"]
        if (shorter := model.get("calibration_context") or context) < context
    ]
    unlike = [f"Warning: of {model['name']}, {note}." for model in report["models"] if (note := model.get("code"))]
    compared = [f"Warning: {model['name']} {said}." for model in report["models"] for said in model.get("remarks", [])]
    return _windowed(report) + flattered + beyond + unlike + compared + _large_losses(report)


def _windowed(report: Report) -> list[str]:
    """One sentence on bytes that depend on the context."""
    cut = [model for model in report["models"] if "kv_context" in model]
    return [
        f"KV bytes per token, and shares of them, are those of {model['kv_context']:,} tokens: "
        "the windows of some layers keep the older ones out of the cache."
        for model in cut[:1]
    ]


def _large_losses(report: Report) -> list[str]:
    """One sentence on all models that lose much, and one on what could be done."""
    large = [model for model in report["models"] if model["loss_nats"] >= LARGE]
    found = "; ".join(f"{model['name']} {loss_text(model['loss_nats'])}" for model in large)
    step = "A larger cache loses less; healing (convert heal) makes up for a part."
    return [f"Warning: large loss: {found}. {step}"] if found else []


def _tokens(report: Report) -> str:
    scored = sorted({model["tokens"] for model in report["models"]})
    return f"{scored[0]:,}" if len(scored) == 1 else f"{scored[0]:,} to {scored[-1]:,}"


def _protocol_line(report: Report) -> str:
    protocol = report["protocol"]
    algorithm, _, digest = protocol["text_hash"].rpartition(":")
    return markdown(
        f"Protocol {protocol['name']}: context {protocol['context']}, stride {protocol['stride']}, "
        f"BOS {protocol['bos']}, {protocol['dtype']}; text {protocol['text']}, {_tokens(report)} tokens scored, "
        f"{algorithm + ':' if algorithm else ''}{digest[:12]}."
    )


def _protocol_items(report: Report) -> list[tuple[str, str]]:
    """Every scalar of the protocol as (term, description), for the HTML page."""
    labels = {"bos": "BOS rule", "name": "protocol"}
    items = [("tokens scored", _tokens(report))]
    for key, value in report["protocol"].items():
        if not isinstance(value, dict | list | tuple):
            is_count = isinstance(value, int) and not isinstance(value, bool)
            text = "-" if value is None else f"{value:,}" if is_count else printable(str(value))
            items.append((labels.get(key, key.replace("_", " ")), text))
    return items


def _summary(report: Report) -> str:
    """The result in one sentence; no-break spaces keep numbers with their units."""
    source, *others = report["models"]
    before = f"perplexity\N{NO-BREAK SPACE}{perplexity_text(source['perplexity'])}"
    name = printable(source["name"])
    if not others:
        return f"{name} has {before} at {source['kv_bytes_per_token']:,.0f} KV bytes per token; nothing is compared with it."

    # Skip models that save nothing, unless there are no others.
    smaller = [model for model in others if model["cache_ratio"] < 1] or others
    best = min(smaller, key=lambda m: (m["loss_nats"], m["cache_ratio"]))
    least = min(smaller, key=lambda m: (m["cache_ratio"], m["loss_nats"]))
    after = f"→\N{NO-BREAK SPACE}{perplexity_text(best['perplexity'])}"
    result = f"keeps {_share(best)} of the KV cache at {_loss(best)} ({before} {after})"
    if len(others) == 1:
        return f"{_title(best)} {result}."
    scope = f"Of {len(others)} models compared with {name}, {_title(best)} loses least"
    if best is least:
        return f"{scope} and caches least: it {result}.{_dominated(report)}"
    rest = f"{_share(least)} at {_loss(least)} (perplexity\N{NO-BREAK SPACE}{perplexity_text(least['perplexity'])})"
    return f"{scope}: it {result}; {_title(least)} caches least: {rest}.{_dominated(report)}"


def _dominated(report: Report) -> str:
    """One sentence on the converted models that lose more than the source does with as small a cache in some format; or ""."""
    source, *others = report["models"]
    stored = [model for model in others if model["path"] == source["path"] and cache_format(model)]
    converted = [model for model in others if model["path"] != source["path"]]
    worse = {
        index: [m for m in converted if m["cache_ratio"] >= row["cache_ratio"] and m["loss_nats"] > row["loss_nats"]]
        for index, row in enumerate(stored)
    }
    best = max(worse, key=lambda index: (len(worse[index]), -stored[index]["cache_ratio"]), default=None)
    if best is None or not worse[best]:
        return ""
    row, named = stored[best], list(dict.fromkeys(map(_title, worse[best])))
    listed = ", ".join(named[:-1]) + (" and " if named[1:] else "") + named[-1]
    return (
        f" The source itself with a cache in {cache_format(row)} keeps {_share(row)} at {_loss(row)}: "
        f"it loses less than {listed}, with no larger cache."
    )


def _title(model: Model) -> str:
    notes = [note for note in (model["method"], cache_format(model) and f"{cache_format(model)} cache") if note]
    return printable(f"{model['kind']} ({', '.join(notes)})" if notes else model["kind"])


def _share(model: Model) -> str:
    return f"{100 * model['cache_ratio']:.3g}\N{NO-BREAK SPACE}%"


def _loss(model: Model) -> str:
    return f"{fixed(model['loss_nats'], '+.3f')}\N{NO-BREAK SPACE}nats"


def to_html(report: Report) -> str:
    """One HTML page without external references; the same report gives the same bytes."""
    page = _template("report.html.j2").render(
        colours=_colours(),
        source=printable(report["models"][0]["name"]),
        version=report["kvfold"],
        summary=" ".join([_summary(report), *map(printable, _warnings(report))]),
        curves=_drawings(
            "curve", lambda width: 340 if width < 400 else _CURVE[1], functools.partial(curve.draw, report["models"])
        ),
        sections=[
            (part, _drawings(part.key, part.chart.height, part.chart.draw) if part.chart is not None else [])
            for part in sections(report)
        ],
        protocol=_protocol_items(report),
        json=to_json(report),
    )
    return page + "\n"


def to_svg(report: Report) -> str:
    """The curve of quality against cache size alone, for other documents; the same report gives the same bytes."""
    width, height = _CURVE
    return str(
        _template("curve.svg.j2").render(
            colours=_colours(),
            label=f"Perplexity against KV bytes per token. {_summary(report)}",
            drawing=curve.draw(report["models"], "curve-alone", width, height),
            width=width,
            height=height,
        )
    )


def _drawings(key: str, height: Callable[[int], int], draw: Callable[[str, int, int], str]) -> list[tuple[str, int, int, str]]:
    """Two drawings, of which one is shown: no single one has legible text at both 360 and 1600 pixels."""
    sizes = {name: (width, height(width)) for name, width in (("narrow", 328), ("wide", _CURVE[0]))}
    return [(name, *size, draw(f"{key}-{name}", *size)) for name, size in sizes.items()]


@functools.cache
def _template(name: str) -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_part(name))


def _colours() -> str:
    """The style sheet of the roles that drawings are coloured by."""
    return _part("colours.css").rstrip()


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def write(report: Report, directory: Path) -> dict[str, Path]:
    """Write report.json, report.md, report.html and curve.svg, each completely or not at all; return their paths by name."""
    made = (to_json, to_markdown, to_html, to_svg)
    return write_pages({name: page(report) for name, page in zip(NAMES, made, strict=True)}, directory)


def require_room(directory: Path, names: Sequence[str], overwrite: bool) -> None:
    """Refuse a directory that cannot be written, or that has files of these names which may not be replaced.

    Raises:
        Refusal: It is so.
    """
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise Refusal(f"cannot write into {directory}: {existing} is not a directory that you may write to")
    if not overwrite and (there := [name for name in names if (directory / name).exists()]):
        raise Refusal(f"{directory / there[0]} exists", hint="give --overwrite, or another --output")


def write_pages(pages: dict[str, str], directory: Path) -> dict[str, Path]:
    """Write each of `pages`, text by file name, completely or not at all; return their paths by name."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        temporary = directory / f".{name}.{os.getpid()}"
        try:
            temporary.write_bytes(text.encode())
            temporary.replace(directory / name)
        finally:
            temporary.unlink(missing_ok=True)
    return {name: directory / name for name in pages}
