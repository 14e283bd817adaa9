"""One plot as SVG: lines over common axes. Pure.

Coordinates are integers, relative to the previous point, so a line of 600 points takes 4 KB. The page gives
lines their colours and dashes, by the classes `c0` to `c7`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite

from delta_prop_simulations.report.axis import Axis
from delta_prop_simulations.report.style import PLOT_STYLE, colour_rules

COLOUR_COUNT = 8
POINTS_MAX = 600
WIDTH, HEIGHT = 4000, 2200
"""The size of a drawing, in tenths of a pixel."""
FONT_SIZE = 115
TOP, RIGHT, BOTTOM = 70, 130, 210
CHARACTER_WIDTH = 66
"""The approximate width of a character in a tick's label."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `colour`: the number of its colour, the same in every plot of a page."""

    name: str
    colour: int
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines with their axes. `title`: the name of the quantity, without the unit."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]

    @property
    def heading(self) -> str:
        """The title with the values' unit, or "logarithmic": then each tick's label has its unit."""
        unit = "logarithmic" if self.y.logarithmic else self.y.unit
        return f"{self.title}, {unit}" if unit else self.title


def svg(plot: Plot, *, points_max: int = POINTS_MAX) -> str:
    """Return the plot as one `<svg>` element, for a page whose style sheet has the colours."""
    left = left_of(plot)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.heading)}"'
        f' data-x="{_scale(plot.x, left, WIDTH - RIGHT)}" data-y="{_scale(plot.y, HEIGHT - BOTTOM, TOP)}">'
        f"{drawing(plot, points_max=points_max)}</svg>"
    )


def left_of(plot: Plot) -> int:
    """Return the left edge of the plot's area, which is right of the longest label."""
    return 90 + CHARACTER_WIDTH * max(len(label) for _, label in plot.y.ticks)


def drawing(plot: Plot, *, points_max: int = POINTS_MAX) -> str:
    """Return the content of the `<svg>` element: grid, labels, lines."""
    left = left_of(plot)
    return "".join([*_grid(plot, left), *(_path(plot, line, left, points_max) for line in plot.lines)])


def colour_class(colour: int) -> str:
    """Return the class that gives a line its colour and its dashes."""
    return f"c{colour % COLOUR_COUNT}"


def thin(xs: Sequence[float], ys: Sequence[float], points_max: int) -> list[tuple[float, float]]:
    """Return up to `points_max` points: the lowest and the highest one of each group of neighbours."""
    points = list(zip(xs, ys, strict=True))
    if len(points) <= points_max:
        return points
    group_count = points_max // 2
    thinned: list[tuple[float, float]] = []
    for group in range(group_count):
        part = points[group * len(points) // group_count : (group + 1) * len(points) // group_count]
        thinned += sorted({min(part, key=_height), max(part, key=_height)})
    return thinned


def _height(point: tuple[float, float]) -> float:
    return point[1] if isfinite(point[1]) else 0.0


def _scale(axis: Axis, from_: int, to: int) -> str:
    """Return the data that the page's script needs to turn a position back into a value."""
    kind = "log" if axis.logarithmic else "linear"
    return escape(f"{kind} {axis.low:.9g} {axis.high:.9g} {from_} {to} {axis.factor:.9g} {axis.unit}")


def _grid(plot: Plot, left: int) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value, label in plot.y.ticks:
        y = bottom - round(plot.y.position(value) * (bottom - TOP))
        yield f'<path class="grid" d="M{left} {y}H{right}"/>'
        yield f'<text x="{left - 40}" y="{y + FONT_SIZE // 3}" text-anchor="end">{escape(label)}</text>'
    last = len(plot.x.ticks) - 1
    for number, (value, label) in enumerate(plot.x.ticks):
        x = left + round(plot.x.position(value) * (right - left))
        yield f'<path class="grid" d="M{x} {TOP}V{bottom + 30}"/>'
        unit = f" {plot.x.unit}" if number == last and plot.x.unit else ""
        anchor = "end" if x > WIDTH - 300 and unit else "middle"
        yield (
            f'<text x="{min(x + 110, WIDTH - 10) if anchor == "end" else x}" y="{bottom + 160}"'
            f' text-anchor="{anchor}">{escape(label + unit)}</text>'
        )


def _path(plot: Plot, line: Line, left: int, points_max: int) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    steps: list[str] = []
    previous: tuple[int, int] | None = None
    for x, y in thin(line.xs, line.ys, points_max):
        if not isfinite(y):  # a missing value: the line has a gap
            previous = None
            continue
        point = (
            left + round(plot.x.position(x) * (right - left)),
            bottom - round(plot.y.position(y) * (bottom - TOP)),
        )
        steps.append(
            f"M{point[0]} {point[1]}"
            if previous is None
            else f"l{point[0] - previous[0]} {point[1] - previous[1]}"
        )
        previous = point
    classes, name = f"line {colour_class(line.colour)}", escape(line.name)
    return f'<path class="{classes}" data-name="{name}" d="{"".join(steps)}"/>'


POINTS_MAX = 300
_TITLE_HEIGHT, _ENTRY_HEIGHT, _COLUMNS = 260, 170, 2
_BASE_STYLE = (
    "svg{--quiet:#59616b;--grid:#dfe3e8;--ground:#fff}"
    "@media (prefers-color-scheme:dark){svg{--quiet:#a3abb5;--grid:#343a41;--ground:#14171a}}"
    ".ground{fill:var(--ground)}.title{font-weight:600}.key{stroke:currentColor;stroke-width:30}"
)


def picture(plot: Plot) -> str:
    """Return the plot as a self-contained SVG document."""
    rows = -(-len(plot.lines) // _COLUMNS)
    height = _TITLE_HEIGHT + HEIGHT + rows * _ENTRY_HEIGHT
    legend = "".join(
        _legend_entry(line.name, line.colour, (index % _COLUMNS) * WIDTH // _COLUMNS, index // _COLUMNS)
        for index, line in enumerate(plot.lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH // 5}">'
        f"<style>{_BASE_STYLE}{PLOT_STYLE}{colour_rules()}</style>"
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>'
        f'<text class="title" x="60" y="170">{escape(plot.heading)}</text>'
        f'<g transform="translate(0 {_TITLE_HEIGHT})">{drawing(plot, points_max=POINTS_MAX)}</g>'
        f'<g transform="translate(0 {_TITLE_HEIGHT + HEIGHT})">{legend}</g></svg>\n'
    )


def _legend_entry(name: str, colour: int, x: int, row: int) -> str:
    y = row * _ENTRY_HEIGHT + 60
    return (
        f'<path class="key line {colour_class(colour)}" d="M{x + 80} {y}h240"/>'
        f'<text x="{x + 380}" y="{y + 38}">{escape(name)}</text>'
    )
