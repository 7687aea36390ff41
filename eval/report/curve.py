"""The quality-versus-cache curve of a report: perplexity against KV bytes per token, as the inside of an inline SVG."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from eval.report.drawing import COLOURS, MARKERS, inside_of_svg, legend, scale, series_label
from eval.report.sections import cache_format
from eval.terminal.escapes import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Model = dict[str, Any]


def draw(models: list[Model], salt: str, width: int, height: int) -> str:
    """The inside of an SVG of `width` by `height`: perplexity against KV bytes per token, one series per method."""

    def plot(figure: Figure, axes: Axes) -> None:
        points = _plot(axes, models)
        legend(figure, axes, width)
        figure.draw_without_rendering()  # fixes the layout, so that labels can avoid each other
        figure.set_layout_engine("none")
        kinds = [printable(" ".join([model["kind"], cache_format(model)]).strip()) for model in models]
        _label(axes, [f"{kinds[0]} (source)", *kinds[1:]], points)

    return inside_of_svg(salt, width, height, plot)


def _plot(axes: Axes, models: list[Model]) -> list[tuple[float, float]]:
    """Draw axes, guide line and series; return the point of each model in data coordinates."""
    smallest = min(model["kv_bytes_per_token"] for model in models)
    unit, name = next((u, n) for u, n in ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes")) if smallest >= u or u == 1)
    points = [(model["kv_bytes_per_token"] / unit, float(model["perplexity"])) for model in models]
    axes.axhline(points[0][1], color=COLOURS["muted"], linestyle=(0, (4, 4)), linewidth=1)
    axes.plot(*points[0], "o", color=COLOURS["ink"], markerfacecolor="none", markersize=9, label="source")
    series = dict.fromkeys(map(_series, models[1:]))
    for index, label in enumerate(series):
        curve = sorted(p for p, model in zip(points[1:], models[1:], strict=True) if _series(model) == label)
        colour, marker = COLOURS[f"series-{index % 8}"], MARKERS[index % len(MARKERS)]
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, markersize=6, label=series_label(label))
    if any(map(cache_format, models)):
        axes.plot(
            *zip(*_front(points), strict=True), color=COLOURS["ink"], linestyle=":", linewidth=1, label="best for its bytes"
        )
    log_x, log_y = scale(axes, 0, [x for x, _ in points]), scale(axes, 1, [y for _, y in points])
    axes.set_xlabel(f"KV bytes per token ({name}{', log scale' if log_x else ''})")
    axes.set_title(f"perplexity{' (log scale)' if log_y else ''}", loc="left")
    return points


def _series(model: Model) -> str:
    """The name of the series that a model belongs to: converted models by method and format, the source in all formats."""
    method, form = model["method"] or "not converted", cache_format(model)
    return f"{method}, {form} cache" if form and model["method"] else method


def _front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points of which none with as few bytes has a lower perplexity, by bytes."""
    front = list[tuple[float, float]]()
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _label(axes: Axes, labels: list[str], points: list[tuple[float, float]]) -> None:
    """Put a label beside each point, where it covers no label, no point, and as little of the lines as possible."""
    from matplotlib.transforms import Bbox

    pixels = axes.transData.transform(points)
    dots, boxes = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in pixels], list[Bbox]()
    inked = [p for line in axes.get_lines() for p in _along(line.get_transform().transform(line.get_xydata()))]
    for index, (label, point, (x, y)) in enumerate(zip(labels, points, pixels, strict=True)):
        if any(label == labels[other] and math.dist((x, y), pixels[other]) < 12 for other in range(index)):
            continue  # one label serves all coinciding points of its kind
        text = axes.annotate(label, point, fontsize=11)
        width, height = text.get_window_extent().size
        text.remove()
        best, offset, box, leader = math.inf, (0.0, 0.0), Bbox.null(), list[tuple[float, float]]()
        for reach, turn in itertools.product((8, 12, 18, 26, 36, 48, 62, 78, 96, 120, 150), range(24)):
            if reach >= best:  # places further away cost more
                break
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
        # A label far from its point gets a line to it.
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
