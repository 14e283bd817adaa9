"""One plot as SVG: lines over common axes, each in its owner's colour. Pure.

Coordinates are integers, steps from point to point: a line of 600 points takes 4 KB. Colours come from the
page, as classes `c0` to `c7`; dashes distinguish lines as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop_simulations.report.axis import Axis

COLOURS = 8
POINTS_MAX = 600
WIDTH, HEIGHT = 4000, 2200
"""The size of a drawing, in tenths of a pixel at its natural size."""
FONT = 115
TOP, RIGHT, BOTTOM = 70, 130, 210
CHARACTER = 66
"""The approximate width of one character of a tick's label."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line, and its colour: the same in every plot of a page."""

    name: str
    colour: int
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines with their axes. `title` names the quantity; the heading adds the unit."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]

    @property
    def heading(self) -> str:
        """The title, with the unit of the values; a logarithmic axis has units at its ticks."""
        unit = "logarithmic" if self.y.logarithmic else self.y.unit
        return f"{self.title}, {unit}" if unit else self.title


def svg(plot: Plot, *, points_max: int = POINTS_MAX) -> str:
    """Return the plot as one `<svg>` element, for a page that has the colours."""
    left = left_of(plot)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.heading)}"'
        f' data-x="{_scale(plot.x, left, WIDTH - RIGHT)}" data-y="{_scale(plot.y, HEIGHT - BOTTOM, TOP)}">'
        f"{drawing(plot, points_max=points_max)}</svg>"
    )


def left_of(plot: Plot) -> int:
    """Return the left edge of the plot's area, right of the longest label."""
    return 90 + CHARACTER * max(len(label) for _, label in plot.y.ticks)


def drawing(plot: Plot, *, points_max: int = POINTS_MAX) -> str:
    """Return the content of the plot's element: grid, labels, lines."""
    left = left_of(plot)
    return "".join([*_grid(plot, left), *(_path(plot, line, left, points_max) for line in plot.lines)])


def colour_class(colour: int) -> str:
    """Return the class that gives a line its colour and its dashes."""
    return f"c{colour % COLOURS}"


def thin(xs: Sequence[float], ys: Sequence[float], points_max: int) -> list[tuple[float, float]]:
    """Return up to `points_max` points, which still include every peak and every trough."""
    points = list(zip(xs, ys, strict=True))
    if len(points) <= points_max:
        return points
    groups = points_max // 2
    thinned: list[tuple[float, float]] = []
    for group in range(groups):
        part = points[group * len(points) // groups : (group + 1) * len(points) // groups]
        thinned += sorted({min(part, key=_height), max(part, key=_height)})
    return thinned


def _height(point: tuple[float, float]) -> float:
    return point[1] if isfinite(point[1]) else 0.0


def _scale(axis: Axis, from_: int, to: int) -> str:
    """Format the data that the read-out needs to turn a position back into a value."""
    kind = "log" if axis.logarithmic else "linear"
    return escape(f"{kind} {axis.low:.9g} {axis.high:.9g} {from_} {to} {axis.factor:.9g} {axis.unit}")


def _grid(plot: Plot, left: int) -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value, label in plot.y.ticks:
        y = bottom - round(plot.y.position(value) * (bottom - TOP))
        yield f'<path class="grid" d="M{left} {y}H{right}"/>'
        yield f'<text x="{left - 40}" y="{y + FONT // 3}" text-anchor="end">{escape(label)}</text>'
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
    at: tuple[int, int] | None = None
    for x, y in thin(line.xs, line.ys, points_max):
        if not isfinite(y):  # a missing value: the line has a gap
            at = None
            continue
        to = (
            left + round(plot.x.position(x) * (right - left)),
            bottom - round(plot.y.position(y) * (bottom - TOP)),
        )
        steps.append(f"M{to[0]} {to[1]}" if at is None else f"l{to[0] - at[0]} {to[1] - at[1]}")
        at = to
    kind, name = f"line {colour_class(line.colour)}", escape(line.name)
    return f'<path class="{kind}" data-name="{name}" d="{"".join(steps)}"/>'
