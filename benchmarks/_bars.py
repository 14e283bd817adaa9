"""Bar charts as SVG documents: one value per row, on a linear or a logarithmic axis. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from delta_prop_simulations.report.style import colour_rules

# All sizes are in pixels.
WIDTH, NAMES, RIGHT = 900, 400, 90  # of the picture, of the column of names, of the margin for labels
ROW, BAR, TOP, BOTTOM = 22, 14, 44, 30  # heights of a row, of its bar, and of both margins
_STYLE = (
    "svg{--quiet:#59616b;--grid:#dfe3e8;--ground:#fff}"
    "@media (prefers-color-scheme:dark){svg{--quiet:#a3abb5;--grid:#343a41;--ground:#14171a}}"
    "text{font:12px system-ui,sans-serif;fill:var(--quiet)}.title{font-weight:600;font-size:14px}"
    ".ground{fill:var(--ground)}.grid{stroke:var(--grid)}.one{stroke:var(--quiet);stroke-width:2}"
    ".bar{fill:currentColor}.r{text-anchor:end}.m{text-anchor:middle}"
)


@dataclass(frozen=True, slots=True)
class Bar:
    """One row. `label` is printed after the bar."""

    name: str
    value: float
    label: str
    colour: int = 0


def bars(title: str, rows: Sequence[Bar], ticks: Sequence[float], *, logarithmic: bool = False) -> str:
    """Return the chart. `ticks` ascend; bars start at the first tick and are clipped at the last one.

    On a logarithmic axis bars start at 1 and extend to the left or to the right.
    """

    def x_of(value: float) -> float:
        low, high = ticks[0], ticks[-1]
        clamped = min(max(value, low), high)
        share = log10(clamped / low) / log10(high / low) if logarithmic else (clamped - low) / (high - low)
        return NAMES + share * (WIDTH - NAMES - RIGHT)

    bottom = TOP + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" width="{WIDTH}">',
        f"<style>{_STYLE}{colour_rules()}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{bottom + BOTTOM}"/>',
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
    ]
    for tick in ticks:
        kind = "one" if logarithmic and tick == 1 else "grid"
        parts.append(f'<path class="{kind}" d="M{x_of(tick):.0f} {TOP - 6}V{bottom}"/>')
        parts.append(f'<text class="m" x="{x_of(tick):.0f}" y="{bottom + 18}">{tick:,g}</text>')
    axis_x = x_of(1.0) if logarithmic else x_of(ticks[0])
    for index, row in enumerate(rows):
        y, end = TOP + ROW * index, x_of(row.value)
        left, right = sorted((axis_x, end))
        parts.append(f'<text class="r" x="{NAMES - 10}" y="{y + 12}">{escape(row.name)}</text>')
        parts.append(
            f'<rect class="bar c{row.colour}" x="{left:.1f}" y="{y}" width="{max(right - left, 1):.1f}" '
            f'height="{BAR}"/>'
        )
        parts.append(f'<text x="{max(right, axis_x) + 6:.0f}" y="{y + 12}">{escape(row.label)}</text>')
    return "".join([*parts, "</svg>\n"])
