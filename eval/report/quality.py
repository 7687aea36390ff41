"""Renders a report (`eval.evaluate` returns one) as JSON, Markdown and one self-contained HTML page with a plot.

A report is a plain dict; this module measures nothing and loads neither models nor tokenizers. Its tables are one list for
Markdown and HTML, so they always agree.
"""

import io
import json
import math
import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from attention.errors import Failure, Refusal
from eval.inputs.sealed import write_whole
from eval.inputs.text import WARN_ABOVE
from eval.terminal.text import markdown, printable, table

Model = dict[str, Any]
Report = dict[str, Any]

NAMES = ("report.json", "report.md", "report.html")
LARGE = 0.25  # nats from which on a loss is said in words, too: perplexity × 1.3
_DOUBLED = math.log(2)  # of the perplexity
# Of the plot.
_MARKERS = "osD^vPX<>*hpd"
_SIZE = (760, 440)  # pixels
_ROW = 18  # pixels of a row of the legend
_STYLE = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    "axes.grid": True,
    "grid.color": "#d9dde2",
    "font.size": 12,
    "svg.fonttype": "none",  # text that can be selected
    "svg.hashsalt": "kvfold",
}


def to_json(report: Report) -> str:
    """The report itself, for scripts. Raises `Failure` on a number that JSON cannot hold."""
    probes = {key: report.get(key) for key in ("other_contexts", "probes")}
    owners: dict[str, dict[str, Any]] = {"the protocol": report["protocol"], "the report": probes}
    owners |= {f'model "{printable(model["name"])}"': model for model in report["models"]}
    for owner, key, value in ((owner, key, value) for owner, items in owners.items() for key, value in items.items()):
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
        parts += [markdown(part.note)] if part.note else []
    return "\n\n".join([*parts, *map(markdown, _remarks(report))]) + "\n"


def _remarks(report: Report) -> list[str]:
    """The protocol, and what to know before the figures are believed, a sentence each."""
    protocol = report["protocol"]
    measured = (
        f"Protocol {protocol['name']}: context {protocol['context']}, stride {protocol['stride']}, BOS {protocol['bos']}, "
        f"{protocol['dtype']}; text {protocol['text']}, {report['models'][0]['tokens']:,} tokens scored, "
        f"{protocol['text_hash'][: len('sha256:') + 12]}."
    )
    context = max([protocol["context"], *(other["context"] for other in report.get("other_contexts", []))])
    context = max([context, *(one["at"] or 0 for model in report.get("probes") or [] for one in model["found"])])
    flattered = [
        f"Warning: {model['name']} was fitted to text that holds {100 * overlap:.3g} % of this one, which flatters its figures."
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
    windowed = [
        f"KV bytes per token, and shares of them, are those of {model['kv_context']:,} tokens: "
        "the windows of some layers keep the older ones out of the cache."
        for model in report["models"]
        if "kv_context" in model
    ]
    large = [f"{model['name']} {loss_text(model['loss_nats'])}" for model in report["models"] if model["loss_nats"] >= LARGE]
    step = "A larger cache loses less; healing (convert heal) makes up for a part."
    lossy = [f"Warning: large loss: {'; '.join(large)}. {step}"] if large else []
    return [measured, *windowed[:1], *flattered, *beyond, *unlike, *compared, *lossy]


def to_html(report: Report) -> str:
    """One HTML page without external references; the same report gives the same bytes."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("report.html.j2").read_text("utf-8"))
    svg = to_svg(report["models"])
    return template.render(
        source=printable(report["models"][0]["name"]),
        version=report["kvfold"],
        remarks=list(map(printable, _remarks(report))),
        plot=svg[svg.index("<svg") :],  # an XML declaration and the document type precede it
        sections=sections(report),
        json=to_json(report),
    )


def write(report: Report, directory: Path) -> None:
    """Write report.json, report.md and report.html, each completely or not at all."""
    write_pages(dict(zip(NAMES, (to_json(report), to_markdown(report), to_html(report)), strict=True)), directory)


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


def write_pages(pages: dict[str, str], directory: Path) -> None:
    """Write each of `pages`, text by file name, completely or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        write_whole(directory / name, text.encode())


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


def loss_text(nats: float, spec: str = "+.4f") -> str:
    """A loss over the source, and what it means if it is large."""
    return f"{fixed(nats, spec)} nats" + (f" ({meaning(nats)})" if nats >= LARGE else "")


def meaning(nats: float) -> str:
    """What a large loss means."""
    factor = math.exp(min(nats, 700))  # which a float can hold
    return f"perplexity × {factor:.2g}: expect {'text that is hardly of use' if nats >= _DOUBLED else 'worse text'}"


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
    models = report["models"]
    rows = [_cells(model, COLUMNS) for model in models]
    if any(model["path"] != models[0]["path"] for model in models):
        rows[0][0] += " (source)"
    tables = [Section(list(COLUMNS), rows, len(_IDENTITY))]
    for other in report.get("other_contexts", []):
        columns = {f"at context {other['context']:,}": _IDENTITY["model"], **_QUALITY}
        tables.append(Section(list(columns), [_cells(model, columns) for model in other["models"]]))
    return [*tables, _probes(report["probes"])] if report.get("probes") else tables


def _cells(model: Model, columns: _Columns) -> list[str]:
    return [printable(cell(model)) for cell in columns.values()]


def _probes(found: list[Model]) -> Section:
    """What each model loses at each position, and what it finds again over each distance: a row for each task and model."""
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
    return Section(["probe", "model", *(f"{at:,}" for at in distances), "anywhere"], rows, 2, note)


def _probed(one: Model | None, is_source: bool) -> str:
    if one is None:
        return "-"
    error = "" if is_source or one["standard_error"] is None else f" ± {one['standard_error']:.2f}"
    exact = f" ({one['exact']:.0%})" if "exact" in one else ""
    return f"{one['nats']:{'' if is_source else '+'}z.2f}{error}{exact}"


def to_svg(models: Sequence[Model]) -> str:
    """Perplexity against KV bytes per token: a colour for each method and format, a marker for each kind of attention."""
    import matplotlib.style
    from matplotlib.figure import Figure

    series = list(dict.fromkeys(map(_series, models[1:])))
    kinds = list(dict.fromkeys(printable(model["kind"]) for model in models))
    marker = {kind: _MARKERS[index % len(_MARKERS)] for index, kind in enumerate(kinds)}
    points = [(model["kv_bytes_per_token"] / 1024, float(model["perplexity"])) for model in models]
    with matplotlib.style.context(["default", _STYLE]):  # "default" overrides the user's matplotlibrc
        width, height = _SIZE[0], max(_SIZE[1], _ROW * (3 + len(series) + len(kinds)))
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        axes = figure.add_subplot()
        ring: dict[str, Any] = {"color": "black", "marker": "o", "markerfacecolor": "none", "markersize": 12, "linestyle": ""}
        axes.axhline(points[0][1], color="gray", linestyle="--", linewidth=1)
        axes.plot(*points[0], label="source", **ring)
        for index, label in enumerate(series):
            line = sorted(point for point, model in zip(points[1:], models[1:], strict=True) if _series(model) == label)
            axes.plot(*zip(*line, strict=True), color=f"C{index % 10}", linewidth=1, label=label)
        for point, model in zip(points, models, strict=True):
            colour = "black" if model is models[0] else f"C{series.index(_series(model)) % 10}"
            axes.plot(*point, marker[printable(model["kind"])], color=colour)
        log_x, log_y = (_scaled(axes, which, values) for which, values in zip("xy", zip(*points, strict=True), strict=True))
        axes.set_xlabel(f"KV bytes per token (KiB{', log scale' if log_x else ''})")
        axes.set_ylabel(f"perplexity{' (log scale)' if log_y else ''}")
        for kind in kinds:
            axes.plot([], [], marker[kind], color="black", label=kind)
        figure.legend(loc="outside right upper")
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return stream.getvalue()


def _series(model: Model) -> str:
    """What a colour stands for: a method and the format of the cache, or the source in any format."""
    method, form = model["method"], model.get("cache_format")
    name = printable(f"{method}, {form} cache" if method and form else method or "not converted")
    return f" {name}" if name.startswith("_") else name  # matplotlib leaves out labels that begin with an underscore


def _scaled(axes: Any, which: str, values: Sequence[float]) -> bool:
    """Make axis "x" or "y" logarithmic if the values span a factor of four; whether it is. A linear x begins at 0."""
    from matplotlib.ticker import LogLocator

    axis, log = getattr(axes, f"{which}axis"), max(values) > 4 * min(values) > 0
    if log:
        axes.set(**{f"{which}scale": "log"})
        axis.set_major_locator(LogLocator(2) if which == "x" else LogLocator(10, (1, 2, 3, 5, 7)))
    elif which == "x":
        axes.set_xlim(0, 1.1 * max(values))
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.minorticks_off()
    return log
