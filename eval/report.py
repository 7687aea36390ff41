"""Renders a report (DESIGN.md, section 8) as JSON, Markdown and one self-contained HTML page.

A report is a plain dict; this module measures nothing and knows neither models nor tokenizers. One list of columns
feeds the Markdown and the HTML table, so the two cannot drift apart.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import unicodedata
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attention.errors import Failure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Model = dict[str, Any]
Report = dict[str, Any]


class Column(NamedTuple):
    """One column of every table; everything but plain text is right-aligned."""

    header: str
    numeric: bool
    cell: Callable[[Model], str]


def _perplexity(value: float) -> str:
    """Four significant digits as long as they read well: 5.472, 30.12, 412.6, 8,103, 3.2e+07."""
    if value >= 1e6:
        return f"{value:.2g}"
    return f"{value:,.{max(0, 3 - int(math.log10(value)))}f}" if value >= 1 else f"{value:.3f}"


def _fixed(value: float, spec: str = ".4f") -> str:
    """Fixed decimals; what rounds to nothing bears no sign, so that no row reads `-0.0000`."""
    return format(value, spec) if round(value, 4) else f"{0:.4f}"


def _divergence(value: float) -> str:
    # An exact conversion has KL 0; a nearly exact one must not look the same.
    return "<0.0001" if 0 < value < 5e-5 else _fixed(value)


COLUMNS = (
    Column("model", False, lambda m: m["name"]),
    Column("attention", False, lambda m: m["kind"]),
    Column("method", False, lambda m: m["method"] or "-"),
    Column("KV bytes/token", True, lambda m: f"{m['kv_bytes_per_token']:,}"),
    Column("of source", True, lambda m: f"{m['cache_ratio']:.2%}".replace("%", " %")),
    Column("perplexity", True, lambda m: _perplexity(m["perplexity"])),
    Column("loss (nats)", True, lambda m: _fixed(m["loss_nats"], "+.4f")),
    Column("bits/byte", True, lambda m: f"{m['bits_per_byte']:.3f}"),
    Column("KL", True, lambda m: _divergence(m["kl_to_source"])),
    Column("top-1 agreement", True, lambda m: f"{m['top1_agreement']:.1%}".replace("%", " %")),
)


def _printable(text: str) -> str:
    """Names and paths come from users: line breaks, terminal escapes and bidi controls must not reach the output."""
    return "".join(c if c.isprintable() else " " for c in text)


def _rows(report: Report) -> list[list[str]]:
    rows = [[_printable(column.cell(model)) for column in COLUMNS] for model in report["models"]]
    rows[0][0] += " (source)"
    return rows


def to_json(report: Report) -> str:
    """The report itself, for scripts. Raises `Failure` on a number that JSON cannot hold."""
    fields = [("the protocol", report["protocol"])]
    fields += [(f'model "{_printable(model["name"])}"', model) for model in report["models"]]
    for owner, key, value in ((owner, key, value) for owner, items in fields for key, value in items.items()):
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise Failure(
                f"cannot write the report: {key} of {owner} is {value}, but every number must be finite",
                hint="overflowing or NaN logits give this: evaluate with --dtype float32; if it stays, convert again",
            ) from None
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def to_markdown(report: Report) -> str:
    """One GitHub table and one line naming the protocol; padded, so that it also reads well on a terminal."""
    # Backslashes keep a name from breaking the table or turning into markup.
    cells = [[re.sub(r"([\\`*\[\]<>|~])", r"\\\1", cell) for cell in row] for row in _rows(report)]
    widths = [max(_width(text) for text in texts) for texts in zip([c.header for c in COLUMNS], *cells, strict=True)]

    def line(texts: list[str]) -> str:
        gaps = [" " * (width - _width(text)) for text, width in zip(texts, widths, strict=True)]
        padded = [gap + t if c.numeric else t + gap for c, t, gap in zip(COLUMNS, texts, gaps, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = line(["-" * (width - 1) + (":" if c.numeric else "-") for c, width in zip(COLUMNS, widths, strict=True)])
    return "\n".join([line([c.header for c in COLUMNS]), rule, *map(line, cells), "", _protocol_line(report)]) + "\n"


def _width(text: str) -> int:
    """Terminal columns, not characters: East Asian wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def _tokens(report: Report) -> str:
    scored = sorted({model["tokens"] for model in report["models"]})
    return f"{scored[0]:,}" if len(scored) == 1 else f"{scored[0]:,} to {scored[-1]:,}"


def _protocol_line(report: Report) -> str:
    protocol = report["protocol"]
    algorithm, _, digest = protocol["text_hash"].rpartition(":")
    return _printable(
        f"Protocol {protocol['name']}: context {protocol['context']}, stride {protocol['stride']}, "
        f"BOS {protocol['bos']}, {protocol['dtype']}; text {protocol['text']}, {_tokens(report)} tokens scored, "
        f"{algorithm + ':' if algorithm else ''}{digest[:12]}."
    )


def _protocol_items(report: Report) -> list[tuple[str, str]]:
    """Every scalar of the protocol as (term, description), for the page."""
    labels = {"bos": "BOS rule", "name": "protocol"}
    items = [("tokens scored", _tokens(report))]
    for key, value in report["protocol"].items():
        if not isinstance(value, dict | list | tuple):
            is_count = isinstance(value, int) and not isinstance(value, bool)
            text = "-" if value is None else f"{value:,}" if is_count else _printable(str(value))
            items.append((labels.get(key, key.replace("_", " ")), text))
    return items


def _summary(report: Report) -> str:
    """The result in one plain sentence; no-break spaces keep a number with what belongs to it."""
    source, *others = report["models"]
    before = f"perplexity\N{NO-BREAK SPACE}{_perplexity(source['perplexity'])}"
    name = _printable(source["name"])
    if not others:
        return f"{name} has {before} at {source['kv_bytes_per_token']:,} KV bytes per token; nothing is compared with it."

    def title(model: Model) -> str:
        return _printable(f"{model['kind']} ({model['method']})" if model["method"] else model["kind"])

    def share(model: Model) -> str:
        return f"{100 * model['cache_ratio']:.3g}\N{NO-BREAK SPACE}%"

    def loss(model: Model) -> str:
        return f"{_fixed(model['loss_nats'], '+.3f')}\N{NO-BREAK SPACE}nats"

    # A model that saves nothing is no result, unless there is nothing else.
    smaller = [model for model in others if model["cache_ratio"] < 1] or others
    best = min(smaller, key=lambda m: (m["loss_nats"], m["cache_ratio"]))
    least = min(smaller, key=lambda m: (m["cache_ratio"], m["loss_nats"]))
    after = f"→\N{NO-BREAK SPACE}{_perplexity(best['perplexity'])}"
    result = f"keeps {share(best)} of the KV cache at {loss(best)} ({before} {after})"
    if len(others) == 1:
        return f"{title(best)} {result}."
    scope = f"Of {len(others)} models compared with {name}, {title(best)} loses least"
    if best is least:
        return f"{scope} and caches least: it {result}."
    rest = f"{share(least)} at {loss(least)} (perplexity\N{NO-BREAK SPACE}{_perplexity(least['perplexity'])})"
    return f"{scope}: it {result}; {title(least)} caches least: {rest}."


def to_html(report: Report) -> str:
    """One page without any outside reference; byte-identical for the same report."""
    from jinja2 import Environment, StrictUndefined

    text = resources.files(__package__).joinpath("report.html.j2").read_text("utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # Two drawings, one shown: chart text cannot be legible both at 360 and at 1600 pixels from one.
    sizes = {"narrow": (328, 340), "wide": (760, 440)}
    page = environment.from_string(text).render(
        source=_printable(report["models"][0]["name"]),
        version=report["kvfold"],
        summary=_summary(report),
        curves=[(name, *size, _curve(report["models"], name, *size)) for name, size in sizes.items()],
        columns=COLUMNS,
        rows=_rows(report),
        protocol=_protocol_items(report),
        json=to_json(report),
    )
    return page + "\n"


# What the page's style sheet colours, in light and dark. Each is drawn in a stand-in, which `var(--role)` replaces.
ROLES = ("ink", "muted", "grid", *(f"series-{i}" for i in range(8)))
COLOURS = {role: f"#0102{index:02x}" for index, role in enumerate(ROLES)}
MARKERS = "osD^vPX"  # seven shapes beside eight colours: 56 methods before a pair repeats
STYLE = {
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), COLOURS["grid"]),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), COLOURS["muted"]),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # a `$` in a name is a dollar
    "font.size": 12,
    "axes.titlesize": "medium",
    "axes.grid": True,
    "svg.fonttype": "none",  # real text: the page's font and colours, selectable
}


def _curve(models: list[Model], salt: str, width: int, height: int) -> str:
    """The inside of an SVG of `width` by `height`: perplexity against KV bytes per token, one series a method."""
    import matplotlib.style
    from matplotlib.figure import Figure

    # "default" undoes the reader's matplotlibrc; a salt per drawing keeps the ids apart that share a page.
    with matplotlib.style.context(["default", {**STYLE, "svg.hashsalt": salt}]):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        axes = figure.add_subplot()
        points = _plot(axes, models)
        names = [line.get_label() for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
        columns = min(len(names), max(1, width // (9 * max(len(str(name)) for name in names) + 30)))
        figure.legend(loc="outside upper left", ncols=columns, handlelength=1.2, columnspacing=1.2)
        figure.draw_without_rendering()  # fixes where everything lies, so that labels can avoid each other
        figure.set_layout_engine("none")
        kinds = [_printable(model["kind"]) for model in models]
        _label(axes, [f"{kinds[0]} (source)", *kinds[1:]], points)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True)
    svg = stream.getvalue()
    svg = svg[svg.index("<g id=") : svg.rindex("</svg>")]  # before it: the document type and a dated note
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # numbered the same in both drawings, and nothing refers to them
    for role, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg


def _plot(axes: Axes, models: list[Model]) -> list[tuple[float, float]]:
    """Draws axes, guide line and series; returns the point of each model in data coordinates."""
    smallest = min(model["kv_bytes_per_token"] for model in models)
    unit, name = next((u, n) for u, n in ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes")) if smallest >= u or u == 1)
    points = [(model["kv_bytes_per_token"] / unit, float(model["perplexity"])) for model in models]
    axes.axhline(points[0][1], color=COLOURS["muted"], linestyle=(0, (4, 4)), linewidth=1)
    axes.plot(*points[0], "o", color=COLOURS["ink"], markerfacecolor="none", markersize=9, label="source")
    methods = dict.fromkeys(model["method"] for model in models[1:])
    for index, method in enumerate(methods):
        curve = sorted(p for p, model in zip(points[1:], models[1:], strict=True) if model["method"] == method)
        colour, marker, label = COLOURS[f"series-{index % 8}"], MARKERS[index % len(MARKERS)], method or "not converted"
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, markersize=6, label=_printable(label))
    log_x, log_y = _scale(axes, 0, [x for x, _ in points]), _scale(axes, 1, [y for _, y in points])
    axes.set_xlabel(f"KV bytes per token ({name}{', log scale' if log_x else ''})")
    axes.set_title(f"perplexity{' (log scale)' if log_y else ''}", loc="left")
    return points


def _scale(axes: Axes, which: int, values: list[float]) -> bool:
    """Sets limits and ticks of axis `which` (0: x, 1: y), logarithmic from a span of four on."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

    axis, low, high = (axes.xaxis, axes.yaxis)[which], min(values), max(values)
    log = high > 4 * low > 0
    if log:
        (axes.set_xscale, axes.set_yscale)[which]("log")
        pad = (high / low) ** 0.12
        low, high = low / pad**1.5, high * pad  # labels find room below the source
        # Caches come in powers of two.
        subs = (1, 2, 3, 5, 7) if high < 15 * low else (1, 2, 5) if high < 300 * low else (1,)
        axis.set_major_locator(LogLocator(2, numticks=7) if which == 0 else LogLocator(10, subs, numticks=12))
    else:
        # A cache is read as a share of the source's, hence from 0; perplexities that agree must not be torn apart.
        pad = 0.15 * max(high - low, 0.02 * high)
        low, high = (0.0, 1.12 * high) if which == 0 else (low - 1.5 * pad, high + pad)
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 5, 8, 10] if which == 0 else [1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(EngFormatter(sep="") if log and high > 1e4 else lambda value, _: f"{value:,.6g}")
    axes.minorticks_off()
    (axes.set_xlim, axes.set_ylim)[which](low, high)
    return log


def _label(axes: Axes, labels: list[str], points: list[tuple[float, float]]) -> None:
    """Puts a label beside each point, where it hides no label and no point, and as little of the lines as can be."""
    from matplotlib.transforms import Bbox

    pixels = axes.transData.transform(points)
    dots, boxes = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in pixels], list[Bbox]()
    inked = [p for line in axes.get_lines() for p in _along(line.get_transform().transform(line.get_xydata()))]
    for index, (label, point, (x, y)) in enumerate(zip(labels, points, pixels, strict=True)):
        if any(label == labels[other] and math.dist((x, y), pixels[other]) < 12 for other in range(index)):
            continue  # one label serves all points of its kind that lie on each other
        text = axes.annotate(label, point, fontsize=11)
        width, height = text.get_window_extent().size
        text.remove()
        best, offset, box, leader = math.inf, (0.0, 0.0), Bbox.null(), list[tuple[float, float]]()
        for reach, turn in itertools.product((8, 12, 18, 26, 36, 48, 62, 78, 96, 120, 150), range(24)):
            angle = turn * math.pi / 12
            shift = (reach + width / 2) * math.cos(angle), (reach + height / 2) * math.sin(angle)
            place = Bbox.from_bounds(x + shift[0] - width / 2, y + shift[1] - height / 2, width, height)
            outside = axes.bbox.count_contains([place.min, place.max]) < 2
            line = _along([(x, y), (x + shift[0], y + shift[1])]) if reach > 12 else []
            crossed = sum(other.count_contains(line) > 0 for other in boxes)
            cost = reach + 4 * place.padded(2).count_contains(inked) + 200 * crossed + 1000 * place.count_overlaps(dots)
            cost += 10_000 * (place.count_overlaps(boxes) + outside)
            if cost < best:
                best, offset, box, leader = cost, shift, place, line
        # A label far from its point needs a line to it.
        arrow = {"arrowstyle": "-", "color": COLOURS["muted"], "linewidth": 0.8, "shrinkA": 0, "shrinkB": 4}
        text = axes.annotate(label, point, offset, textcoords="offset points", arrowprops=arrow if leader else None)
        text.set(ha="center", va="center", fontsize=11)
        boxes.append(box)
        inked += leader


def _along(corners: Any) -> list[tuple[float, float]]:
    """Points every few pixels along the line through `corners`."""
    points = []
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        steps = 1 + int(math.hypot(x1 - x0, y1 - y0) / 4)
        points += [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    return points


def write(report: Report, directory: Path) -> dict[str, Path]:
    """Writes report.json, report.md and report.html, each whole or not at all; returns their paths by name."""
    pages = {"report.json": to_json(report), "report.md": to_markdown(report), "report.html": to_html(report)}
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        temporary = directory / f".{name}.{os.getpid()}"
        try:
            temporary.write_bytes(text.encode())
            temporary.replace(directory / name)
        finally:
            temporary.unlink(missing_ok=True)
    return {name: directory / name for name in pages}
