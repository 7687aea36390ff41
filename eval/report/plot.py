"""The plot of a report, as SVG. The same figures give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eval.terminal.escapes import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


def _scaled(axes: Axes, which: str, values: Sequence[float]) -> bool:
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
