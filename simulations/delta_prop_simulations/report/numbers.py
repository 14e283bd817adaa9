"""The numbers of a result, side by side: a row for each figure, a column for each alternative. Pure.

The page and the terminal's table show the same rows, in the same words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop_simulations.report.axis import shown
from delta_prop_simulations.report.figures import sink_names, sink_of, unique

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delta_prop_simulations.laboratory.result import Alternative, Latency, Result, SinkResult

NOTHING = "–"
QUANTILES = (("p50", "median"), ("p99", "99 %"), ("p999", "99.9 %"), ("max", "longest"))
PROMISES = {
    "P1": "nothing acknowledged is lost",
    "P2": "causal order everywhere",
    "P3": "each delta has one effect",
    "P4": "a slow sink harms nobody, bounds hold",
    "P5": "nothing waits or is refused unexplained",
    "P6": "urgent work goes first",
    "P7": "damage is told",
    "P8": "clocks, restarts, repeats change nothing",
    "P9": "the network can do no harm",
}
KEPT, LIMITED, BROKEN, NOT_EXERCISED = "kept", "kept, but", "BROKEN", "not put to the test"


class Row(NamedTuple):
    """One figure of every alternative, as it is written."""

    name: str
    cells: tuple[str, ...]


class Group(NamedTuple):
    """Rows under one heading."""

    name: str
    rows: tuple[Row, ...]


def groups(result: Result) -> tuple[Group, ...]:
    """All numbers: the service's, then each sink's."""
    alternatives = result.alternatives
    totals = unique(name for one in alternatives for name in one.totals)
    service = [
        Row(_words(name), tuple(_total(one, name) for one in alternatives))
        for name in totals
        if any(one.totals.get(name) for one in alternatives) or name in _ALWAYS
    ]
    if any(one.acks.count for one in alternatives):
        service += [
            Row(f"acknowledged after, {label}", tuple(_late(one.acks, key) for one in alternatives))
            for key, label in QUANTILES
        ]
    service.append(Row("× real time", tuple(_speed(one) for one in alternatives)))
    sinks = sink_names(result)
    return (
        Group("service", tuple(service)),
        *(Group(sink, tuple(_sink_rows(result, sink))) for sink in sinks),
    )


def verdicts(result: Result) -> tuple[Row, ...]:
    """For each promise whether each alternative kept it."""
    promises = sorted(unique(one.promise for each in result.alternatives for one in each.verdicts))
    return tuple(
        Row(promise, tuple(_verdict(alternative, promise) for alternative in result.alternatives))
        for promise in promises
    )


def promised(promise: str) -> str:
    """A promise with its words."""
    return f"{promise} {PROMISES.get(promise, '')}".rstrip()


def evidence(alternative: Alternative, promise: str) -> str:
    """What was seen of a promise."""
    return next((one.what for one in alternative.verdicts if one.promise == promise), "")


_ALWAYS = ("offered", "acknowledged", "refused")
"""Told also where they are 0; other totals are left out where no alternative has any."""


def _words(name: str) -> str:
    """The name of a total for people: its unit stands with the value."""
    for ending in ("_bytes", "_s", "_deltas"):
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def _total(alternative: Alternative, name: str) -> str:
    value = alternative.totals.get(name)
    if value is None:
        return NOTHING
    if "bytes" in name:
        return shown(value, "bytes")
    if name.endswith("_s"):
        return shown(value, "s")
    return f"{value:,.0f}" if value == int(value) else shown(value, "")


def _speed(alternative: Alternative) -> str:
    return shown(alternative.virtual_s / alternative.cpu_s, "") if alternative.cpu_s > 0 else NOTHING


def _sink_rows(result: Result, name: str) -> Iterator[Row]:
    sinks = [sink_of(alternative, name) for alternative in result.alternatives]

    def row(label: str, cell: Callable[[SinkResult], str]) -> Row:
        return Row(label, tuple(cell(sink) for sink in sinks))

    yield row("applied", lambda sink: f"{sink.applied:,}")
    yield row("applied within 1 s, a second", lambda sink: shown(sink.within_1s_per_s, ""))
    for key, label in QUANTILES:
        yield row(f"lag, {label}", lambda sink, key=key: _late(sink.lag, key))  # type: ignore[misc]
    if any(sink.failures for sink in sinks):
        yield row("failures", lambda sink: f"{sink.failures:,}")


def _late(latency: Latency, key: str) -> str:
    value = latency.quantiles.get(key)
    return NOTHING if value is None or not latency.count else shown(value, "s")


def _verdict(alternative: Alternative, promise: str) -> str:
    verdicts = [one for one in alternative.verdicts if one.promise == promise]
    said = [one.ok for one in verdicts]
    if not said:
        return NOTHING
    kept = LIMITED if any(one.limited for one in verdicts) else KEPT
    return BROKEN if False in said else kept if True in said else NOT_EXERCISED
