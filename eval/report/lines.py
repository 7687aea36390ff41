"""Line charts of a report, one line per model: loss by position, recall over distance; as the inside of an inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.report.drawing import COLOURS, MARKERS, inside_of_svg, legend, legend_columns, scale, series_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG = 20  # the ratio of values above which a linear axis hides the smaller ones


@dataclass(frozen=True)
class Lines:
    """A line chart.

    Attributes:
        title: What the vertical axis shows, with its unit.
        below: What the horizontal axis shows. Its values are evenly spaced: they double, or differ by the same.
        ticks: The values of the horizontal axis.
        lines: The name of each line, and its values.
    """

    title: str
    below: str
    ticks: Sequence[int]
    lines: Sequence[tuple[str, Sequence[float]]]

    def height(self, width: int) -> int:
        """Pixels that the drawing needs at a width: 240, and 18 for each row of the legend."""
        return 240 + 18 * -(-len(self.lines) // legend_columns([name for name, _ in self.lines], width))

    def draw(self, salt: str, width: int, height: int) -> str:
        """The inside of an SVG of `width` by `height`."""

        def plot(figure: Figure, axes: Axes) -> None:
            places = range(len(self.ticks))
            for index, (name, values) in enumerate(self.lines):
                colour, marker = COLOURS[f"series-{index % 8}"], MARKERS[index % len(MARKERS)]
                axes.plot(places, values, color=colour, marker=marker, markersize=5, label=series_label(name))
            values = [value for _, line in self.lines for value in line]
            log = max(values) > _LOG * min(values) > 0
            if log:
                scale(axes, 1, values)
            else:
                axes.set_ylim(min(0.0, *values), max(1e-3, *values) * 1.08)
            axes.set_xticks(places, [f"{tick:,}" for tick in self.ticks])
            axes.set_title(self.title + (" (log scale)" if log else ""), loc="left")
            axes.set_xlabel(self.below)
            legend(figure, axes, width)

        return inside_of_svg(salt, width, height, plot)
