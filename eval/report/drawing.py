"""The base of the drawings in reports: their style, their axes, and a figure as the inside of an inline SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eval.terminal.escapes import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Roles that the page's style sheet colours, in light and dark. Each is drawn in a placeholder, which `var(--role)` replaces.
ROLES = ("ink", "muted", "grid", *(f"series-{i}" for i in range(8)))
COLOURS = {role: f"#0102{index:02x}" for index, role in enumerate(ROLES)}
MARKERS = "osD^vPX"  # seven shapes with eight colours: 56 methods before a pair repeats
STYLE = {
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), COLOURS["grid"]),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), COLOURS["muted"]),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "text.color": COLOURS["ink"],
    "text.parse_math": False,  # a `$` in a name is a dollar sign
    "font.size": 12,
    "axes.titlesize": "medium",
    "axes.grid": True,
    "svg.fonttype": "none",  # real text, which is selectable and takes the page's font and colours
}


def drawn(style: Mapping[str, Any], width: int, height: int, plot: Callable[[Figure, Axes], object], **saving: Any) -> str:
    """An SVG of `width` by `height` pixels; `plot` draws into the figure and its axes, `saving` goes to `Figure.savefig`."""
    import matplotlib.style
    from matplotlib.figure import Figure

    # "default" overrides the user's matplotlibrc.
    with matplotlib.style.context(["default", style]):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        plot(figure, figure.add_subplot())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", **saving)
    return stream.getvalue()


def inside_of_svg(salt: str, width: int, height: int, plot: Callable[[Figure, Axes], object]) -> str:
    """The inside of an SVG of `width` by `height`; its colours are variables of the page's style sheet.

    Args:
        salt: Another one for each drawing of a page, so that their ids differ.
        width: In pixels.
        height: In pixels.
        plot: Draws into the figure and its axes.
    """
    svg = drawn({**STYLE, "svg.hashsalt": salt}, width, height, plot, transparent=True)
    svg = svg[svg.index("<g id=") : svg.rindex("</svg>")]  # what precedes it is the document type and a dated note
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # all drawings use the same numbers, and nothing refers to them
    for role, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg


def legend(figure: Figure, axes: Axes, width: int) -> None:
    """A legend above the axes of all series with a name."""
    names = [str(line.get_label()) for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    figure.legend(loc="outside upper left", ncols=legend_columns(names, width), handlelength=1.2, columnspacing=1.2)


def legend_columns(names: Sequence[str], width: int) -> int:
    """How many of these names stand side by side in a legend."""
    return min(len(names), max(1, width // (9 * max(map(len, names)) + 30)))


def series_label(text: str) -> str:
    """A series' name in a legend. matplotlib leaves out those whose label begins with an underscore."""
    shown = printable(text)
    return f" {shown}" if shown.startswith("_") else shown


def scale(axes: Axes, which: int, values: list[float]) -> bool:
    """Set limits and ticks of axis `which` (0: x, 1: y), logarithmic if the values span a factor of four; whether it is."""
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

    axis, low, high = (axes.xaxis, axes.yaxis)[which], min(values), max(values)
    log = high > 4 * low > 0
    if log:
        (axes.set_xscale, axes.set_yscale)[which]("log")
        pad = (high / low) ** 0.12
        low, high = low / pad**1.5, high * pad  # room for labels below the source
        # Caches come in powers of two.
        subs = (1, 2, 3, 5, 7) if high < 15 * low else (1, 2, 5) if high < 300 * low else (1,)
        axis.set_major_locator(LogLocator(2, numticks=7) if which == 0 else LogLocator(10, subs, numticks=12))
    else:
        # A cache is read as a share of the source's, so the axis starts at 0; nearly equal perplexities must look so.
        pad = 0.15 * max(high - low, 0.02 * high)
        low, high = (0.0, 1.12 * high) if which == 0 else (low - 1.5 * pad, high + pad)
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 5, 8, 10] if which == 0 else [1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(EngFormatter(sep="") if log and high > 1e4 else lambda value, _: f"{value:,.6g}")
    axes.minorticks_off()
    (axes.set_xlim, axes.set_ylim)[which](low, high)
    return log
