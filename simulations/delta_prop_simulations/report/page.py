"""A result as one HTML page that loads nothing from a network; the same result gives the same page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from delta_prop_simulations.report.axis import format_value
from delta_prop_simulations.report.figures import sections
from delta_prop_simulations.report.numbers import (
    BROKEN,
    HOLDS,
    LIMITED,
    NOT_TESTED,
    NOTHING,
    Row,
    evidence,
    format_promise,
    groups,
    verdicts,
)
from delta_prop_simulations.report.plot import POINTS_MAX, colour_class, svg
from delta_prop_simulations.report.style import SCRIPT, STYLE, colour_rules
from delta_prop_simulations.scenarios.result import Result

PAGE_POINTS_MAX = 80_000
"""Maximum number of points of all lines together, at about 8 bytes each."""
_CLASSES = {HOLDS: "good", LIMITED: "good", BROKEN: "bad", NOT_TESTED: "quiet", NOTHING: "quiet"}
_SIGNS = {HOLDS: "✓ ", LIMITED: "✓ ", BROKEN: "✗ "}


def html(result: Result, command: str = "") -> str:
    """Return the page. `command`: a shell command that repeats the run."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(result.scenario)}, seed {result.seed}</title>"
        f"<style>{colour_rules()}{STYLE}</style></head><body>",
        *_head(result, command),
        *_promises(result),
        *_numbers(result),
        *_plots(result),
        f"<script>{SCRIPT}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _head(result: Result, command: str) -> Iterator[str]:
    yield f"<h1>{escape(result.scenario)}</h1>"
    if result.about:
        yield f"<p>{escape(result.about)}</p>"
    yield (
        f'<p class="quiet">Seed {result.seed}, {format_value(result.duration_s, "s")} of virtual time. '
        "Deltas went through the production code; time, sinks and sources are simulated.</p>"
    )
    if command:
        yield f"<p>To repeat this run exactly: <code>{escape(command)}</code></p>"
    if any(alternative.what for alternative in result.alternatives):
        yield "<h2>Alternatives</h2><dl>"
        for number, alternative in enumerate(result.alternatives):
            yield f"<dt>{_mark(number)}{escape(alternative.name)}</dt><dd>{escape(alternative.what)}</dd>"
        yield "</dl>"


def _promises(result: Result) -> Iterator[str]:
    rows = verdicts(result)
    if not rows:
        return
    yield "<h2>Promises</h2>"
    yield from _open_table(result)
    yield "<tbody>"
    for row in rows:
        yield _row(Row(format_promise(row.name), row.cells), are_verdicts=True)
    yield "</tbody></table></div><details><summary>Evidence for each</summary><dl>"
    for row in rows:
        yield f"<dt>{escape(format_promise(row.name))}</dt>"
        for alternative, verdict in zip(result.alternatives, row.cells, strict=True):
            what = evidence(alternative, row.name)
            yield f"<dd>{escape(alternative.name)}: {escape(verdict)}. {escape(what)}</dd>"
    yield "</dl></details>"


def _numbers(result: Result) -> Iterator[str]:
    yield "<h2>Side by side</h2>"
    yield from _open_table(result)
    for group in groups(result):
        columns = len(result.alternatives) + 1
        yield f'<tbody><tr><th scope="rowgroup" colspan="{columns}">{escape(group.name)}</th></tr>'
        for row in group.rows:
            yield _row(row)
        yield "</tbody>"
    yield (
        '</table></div><p class="quiet">Lag is the time from a delta’s append to its application. '
        "× real time depends on the machine; all else is the same on every machine.</p>"
    )


def _open_table(result: Result) -> Iterator[str]:
    names = "".join(
        f'<th scope="col">{_mark(number)}{escape(one.name)}</th>'
        for number, one in enumerate(result.alternatives)
    )
    yield f'<div class="scroll"><table><thead><tr><th></th>{names}</tr></thead>'


def _row(row: Row, *, are_verdicts: bool = False) -> str:
    cells = "".join(_verdict(text) if are_verdicts else f"<td>{escape(text)}</td>" for text in row.cells)
    return f'<tr><th scope="row">{escape(row.name)}</th>{cells}</tr>'


def _verdict(text: str) -> str:
    return f'<td class="{_CLASSES[text]}">{_SIGNS.get(text, "")}{escape(text)}</td>'


def _plots(result: Result) -> Iterator[str]:
    all_sections = sections(result)
    line_count = sum(len(plot.lines) for section in all_sections for plot in section.plots)
    points_max = min(POINTS_MAX, PAGE_POINTS_MAX // max(line_count, 1))
    for section in all_sections:
        yield f"<section><h2>{escape(section.title)}</h2>"
        yield from _legend(section.legend)
        yield '<div class="plots">'
        for plot in section.plots:
            caption = f"<figcaption>{escape(plot.heading)}</figcaption>"
            yield f"<figure>{caption}{svg(plot, points_max=points_max)}</figure>"
        yield "</div></section>"


def _legend(names: Sequence[str]) -> Iterator[str]:
    if len(names) > 1:
        items = "".join(f"<li>{_mark(number)}{escape(name)}</li>" for number, name in enumerate(names))
        yield f'<ul class="legend">{items}</ul>'


def _mark(number: int) -> str:
    return f'<span class="mark {colour_class(number)}"></span>'
