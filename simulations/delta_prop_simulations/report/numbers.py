"""The numbers of a result, side by side: a row for each quantity, a column for each alternative. Pure.

The page and the table for the terminal show the same rows, in the same words. If not all alternatives fit
side by side in the terminal, there are several tables, one below the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from delta_prop_simulations.report.axis import format_value
from delta_prop_simulations.report.figures import sink_names, sink_of, unique_names
from delta_prop_simulations.scenarios.result import Alternative, Latency, Result, SinkResult

NOTHING = "–"
QUANTILES = (("p50", "median"), ("p99", "99 %"), ("p999", "99.9 %"), ("max", "longest"))
PROMISES = {
    "P1": "nothing acknowledged is lost",
    "P2": "causal order everywhere",
    "P3": "each delta has one effect",
    "P4": "a slow sink harms no other sink, bounds hold",
    "P5": "no wait and no refusal without a reason",
    "P6": "urgent work goes first",
    "P7": "corruption is reported",
    "P8": "clocks, restarts, retries change nothing",
    "P9": "the network can do no harm",
}
HOLDS, LIMITED, BROKEN, NOT_TESTED = "kept", "kept, but", "BROKEN", "not tested"
"""Verdicts as displayed. LIMITED: the promise holds, with an exception that the evidence names."""


class Row(NamedTuple):
    """One quantity of all alternatives, formatted."""

    name: str
    cells: tuple[str, ...]


class Group(NamedTuple):
    """Rows under one heading."""

    name: str
    rows: tuple[Row, ...]


def groups(result: Result) -> tuple[Group, ...]:
    """Return all numbers: first those of the service, then those of each sink."""
    alternatives = result.alternatives
    totals = unique_names(name for one in alternatives for name in one.totals)
    service = [
        Row(_words(name), tuple(_total(one, name) for one in alternatives))
        for name in totals
        if any(one.totals.get(name) for one in alternatives) or name in _ALWAYS_SHOWN
    ]
    if any(one.acks.count for one in alternatives):
        service += [
            Row(f"acknowledged after, {label}", tuple(_format_lag(one.acks, key) for one in alternatives))
            for key, label in QUANTILES
        ]
    service.append(Row("× real time", tuple(_speed(one) for one in alternatives)))
    sinks = sink_names(result)
    return (
        Group("service", tuple(service)),
        *(Group(sink, tuple(_sink_rows(result, sink))) for sink in sinks),
    )


def verdicts(result: Result) -> tuple[Row, ...]:
    """Return for each promise the verdicts of all alternatives."""
    promises = sorted(
        unique_names(
            verdict.promise for alternative in result.alternatives for verdict in alternative.verdicts
        )
    )
    return tuple(
        Row(promise, tuple(_verdict(alternative, promise) for alternative in result.alternatives))
        for promise in promises
    )


def format_promise(promise: str) -> str:
    """Return a promise with its description."""
    return f"{promise} {PROMISES.get(promise, '')}".rstrip()


def evidence(alternative: Alternative, promise: str) -> str:
    """Return the evidence for the verdict on a promise."""
    return next((verdict.what for verdict in alternative.verdicts if verdict.promise == promise), "")


_ALWAYS_SHOWN = ("offered", "acknowledged", "refused")
"""Totals that are shown even if they are 0; other totals are left out if they are 0 in all alternatives."""


def _words(name: str) -> str:
    """Return the name of a total as words, without its unit, which the value shows."""
    for ending in ("_bytes", "_s", "_deltas"):
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def _total(alternative: Alternative, name: str) -> str:
    value = alternative.totals.get(name)
    if value is None:
        return NOTHING
    if "bytes" in name:
        return format_value(value, "bytes")
    if name.endswith("_s"):
        return format_value(value, "s")
    return f"{value:,.0f}" if value == int(value) else format_value(value, "")


def _speed(alternative: Alternative) -> str:
    return format_value(alternative.virtual_s / alternative.cpu_s, "") if alternative.cpu_s > 0 else NOTHING


def _sink_rows(result: Result, name: str) -> Iterator[Row]:
    sinks = [sink_of(alternative, name) for alternative in result.alternatives]

    def row(label: str, cell: Callable[[SinkResult], str]) -> Row:
        return Row(label, tuple(cell(sink) for sink in sinks))

    yield row("applied", lambda sink: f"{sink.applied:,}")
    yield row("applied within 1 s, per second", lambda sink: format_value(sink.within_1s_per_s, ""))
    for key, label in QUANTILES:
        yield row(f"lag, {label}", lambda sink, key=key: _format_lag(sink.lag, key))  # type: ignore[misc]
    if any(sink.failures for sink in sinks):
        yield row("failures", lambda sink: f"{sink.failures:,}")


def _format_lag(latency: Latency, key: str) -> str:
    value = latency.quantiles.get(key)
    return NOTHING if value is None or not latency.count else format_value(value, "s")


def _verdict(alternative: Alternative, promise: str) -> str:
    verdicts = [verdict for verdict in alternative.verdicts if verdict.promise == promise]
    results = [verdict.ok for verdict in verdicts]
    if not results:
        return NOTHING
    verdict_if_held = LIMITED if any(verdict.limited for verdict in verdicts) else HOLDS
    return BROKEN if False in results else verdict_if_held if True in results else NOT_TESTED


WIDTH = 100
CELL_MIN, NAME_MIN = 12, 30
INDENT = "  "


def format_result(result: Result, *, width: int = WIDTH) -> str:
    """Return the result as text of up to `width` columns, unless a name or evidence is longer."""
    lines = [
        f"{result.scenario}, seed {result.seed}, {format_value(result.duration_s, 's')} of virtual time",
        *_table_lines(result, width),
        *_explanations(result),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _table_lines(result: Result, width: int) -> Iterator[str]:
    cell_width = max([CELL_MIN, *(len(text) for text in _cell_texts(result))]) + 2
    columns_max = max((width - NAME_MIN) // cell_width, 1)
    for first in range(0, len(result.alternatives), columns_max):
        part = replace(result, alternatives=result.alternatives[first : first + columns_max])
        yield ""
        yield from _lines_of_one_table(part, cell_width)


def _cell_texts(result: Result) -> Iterator[str]:
    yield from (alternative.name for alternative in result.alternatives)
    for row in _all_rows(result):
        yield from row.cells


def _all_rows(result: Result) -> Iterator[Row]:
    yield from (Row(format_promise(row.name), row.cells) for row in verdicts(result))
    for group in groups(result):
        yield from group.rows


def _lines_of_one_table(result: Result, cell_width: int) -> Iterator[str]:
    name_width = max([NAME_MIN, *(len(INDENT + row.name) for row in _all_rows(result))])
    yield _line("", [alternative.name for alternative in result.alternatives], name_width, cell_width)
    if rows := verdicts(result):
        yield "promises"
        yield from _lines([Row(format_promise(row.name), row.cells) for row in rows], name_width, cell_width)
    for group in groups(result):
        yield group.name
        yield from _lines(group.rows, name_width, cell_width)


def _lines(rows: Sequence[Row], name_width: int, cell_width: int) -> Iterator[str]:
    for row in rows:
        yield _line(INDENT + row.name, row.cells, name_width, cell_width)


def _line(name: str, cells: Sequence[str], name_width: int, cell_width: int) -> str:
    return f"{name:<{name_width}}" + "".join(f"{text:>{cell_width}}" for text in cells)


def _explanations(result: Result) -> Iterator[str]:
    """Yield the evidence for each promise that is broken, or that holds with an exception."""
    for row in verdicts(result):
        for alternative, verdict in zip(result.alternatives, row.cells, strict=True):
            if verdict in (BROKEN, LIMITED):
                yield f"{verdict}: {row.name} by {alternative.name!r}: {evidence(alternative, row.name)}"
