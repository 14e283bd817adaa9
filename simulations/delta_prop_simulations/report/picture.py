"""One plot as an SVG file with its title and its legend, to be included in other pages. Pure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from delta_prop_simulations.report.plot import HEIGHT, WIDTH, colour_class, drawing
from delta_prop_simulations.report.style import PLOT_STYLE, colour_rules

if TYPE_CHECKING:
    from delta_prop_simulations.report.plot import Plot

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
