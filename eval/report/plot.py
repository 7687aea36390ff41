"""The plot of a report, as SVG. The same figures give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from eval.report.sections import cache_format
from eval.terminal.escapes import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Model = dict[str, Any]

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


def _drawn(draw: Callable[[Figure, Axes], object], rows: int) -> str:
    """An SVG; `draw` draws into the figure and its axes. It grows with the `rows` of a legend beside the axes."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", _STYLE]):  # "default" overrides the user's matplotlibrc
        width, height = _SIZE[0], max(_SIZE[1], _ROW * (rows + 2))
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        draw(figure, figure.add_subplot())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return stream.getvalue()


def to_svg(models: Sequence[Model]) -> str:
    """Perplexity against KV bytes per token: a colour for each method and format, a marker for each kind of attention."""
    series = list(dict.fromkeys(map(_series, models[1:])))
    kinds = list(dict.fromkeys(printable(model["kind"]) for model in models))

    def draw(figure: Figure, axes: Axes) -> None:
        from matplotlib.lines import Line2D

        unit, name = _unit(min(model["kv_bytes_per_token"] for model in models))
        points = [(model["kv_bytes_per_token"] / unit, float(model["perplexity"])) for model in models]
        axes.axhline(points[0][1], color="gray", linestyle="--", linewidth=1)
        axes.plot(*points[0], "o", color="black", markerfacecolor="none", markersize=12)
        for index, label in enumerate(series):
            line = sorted(point for point, model in zip(points[1:], models[1:], strict=True) if _series(model) == label)
            axes.plot(*zip(*line, strict=True), color=f"C{index % 10}", linewidth=1)
        for point, model in zip(points, models, strict=True):
            colour = "black" if model is models[0] else f"C{series.index(_series(model)) % 10}"
            axes.plot(*point, _marker(kinds, model["kind"]), color=colour)
        log_x, log_y = _scale(axes, 0, [x for x, _ in points]), _scale(axes, 1, [y for _, y in points])
        axes.set_xlabel(f"KV bytes per token ({name}{', log scale' if log_x else ''})")
        axes.set_ylabel(f"perplexity{' (log scale)' if log_y else ''}")
        ring = Line2D([], [], color="black", marker="o", markerfacecolor="none", markersize=12, linestyle="", label="source")
        lines = [Line2D([], [], color=f"C{index % 10}", label=label) for index, label in enumerate(series)]
        marks = [Line2D([], [], color="black", marker=_marker(kinds, kind), linestyle="", label=kind) for kind in kinds]
        figure.legend(handles=[ring, *lines, *marks], loc="outside right upper")

    return _drawn(draw, 1 + len(series) + len(kinds))


def _series(model: Model) -> str:
    """What a colour stands for: a method and the format of the cache, or the source in any format."""
    method, form = model["method"], cache_format(model)
    return _label(f"{method}, {form} cache" if method and form else method or "not converted")


def _marker(kinds: list[str], kind: str) -> str:
    return _MARKERS[kinds.index(printable(kind)) % len(_MARKERS)]


def _unit(smallest: float) -> tuple[int, str]:
    return next(
        (unit, name) for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes")) if smallest >= unit or unit == 1
    )


def _label(text: str) -> str:
    """A series' name in a legend. matplotlib leaves out those whose label begins with an underscore."""
    shown = printable(text)
    return f" {shown}" if shown.startswith("_") else shown


def _scale(axes: Axes, which: int, values: list[float]) -> bool:
    """Make axis `which` (0: x, 1: y) logarithmic if the values span a factor of four; whether it is. A linear x begins at 0."""
    from matplotlib.ticker import LogLocator

    axis, log = (axes.xaxis, axes.yaxis)[which], max(values) > 4 * min(values) > 0
    if log:
        (axes.set_xscale, axes.set_yscale)[which]("log")
        axis.set_major_locator(LogLocator(2) if which == 0 else LogLocator(10, (1, 2, 3, 5, 7)))
    elif which == 0:
        axes.set_xlim(0, 1.1 * max(values))
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.minorticks_off()
    return log
