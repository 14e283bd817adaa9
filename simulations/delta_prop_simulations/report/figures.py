"""The plots of a result, with one line per alternative, or per sink of a single alternative. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf, isfinite
from typing import NamedTuple

from delta_prop_simulations.report.axis import Axis, linear_axis, logarithmic_axis
from delta_prop_simulations.report.plot import Line, Plot
from delta_prop_simulations.scenarios.result import Alternative, Latency, Result, Series, SinkResult

SPREAD_MAX = 20.0
"""The factor between two lines' peaks from which the axis is logarithmic, or it would hide one."""


class Section(NamedTuple):
    """Plots that share a legend. `legend`: names in the order of their colours."""

    title: str
    legend: tuple[str, ...]
    plots: tuple[Plot, ...]


def sections(result: Result) -> tuple[Section, ...]:
    """Return all plots of a result: the service over time, its sinks over time, the lag of each sink."""
    names = tuple(alternative.name for alternative in result.alternatives)
    sinks = sink_names(result)
    legend = names if len(names) > 1 or len(sinks) < 2 else sinks
    time = linear_axis(result.duration_s, "s", tight=True)
    all_sections = (
        Section("The service over time", names, tuple(_service_plots(result, time))),
        Section("Each sink over time", legend, tuple(_sink_plots(result, sinks, time))),
        Section("How late deltas were applied", legend, tuple(_latency_plots(result, sinks))),
    )
    return tuple(section for section in all_sections if section.plots)


def _service_plots(result: Result, time: Axis) -> Iterator[Plot]:
    series_lists = [alternative.series for alternative in result.alternatives]
    for name in unique_names(series.name for group in series_lists for series in group):
        yield _time_plot(name, time, _lines([one.name for one in result.alternatives], series_lists, name))


def _sink_plots(result: Result, sinks: Sequence[str], time: Axis) -> Iterator[Plot]:
    series_names = [
        series.name
        for alternative in result.alternatives
        for sink in alternative.sinks
        for series in sink.series
    ]
    for name in unique_names(series_names):
        if len(result.alternatives) == 1:
            own_sinks = result.alternatives[0].sinks
            series_lists = [sink.series for sink in own_sinks]
            yield _time_plot(name, time, _lines([sink.name for sink in own_sinks], series_lists, name))
            continue
        for sink in sinks:
            series_lists = [sink_of(alternative, sink).series for alternative in result.alternatives]
            if lines := _lines([one.name for one in result.alternatives], series_lists, name):
                yield _time_plot(f"{sink}: {name}", time, lines)


def _latency_plots(result: Result, sinks: Sequence[str]) -> Iterator[Plot]:
    if len(result.alternatives) == 1:
        named_lags = [(sink.name, sink.lag) for sink in result.alternatives[0].sinks]
        if plot := _distribution_plot("share applied within", named_lags):
            yield plot
        return
    for sink in sinks:
        named_lags = [(one.name, sink_of(one, sink).lag) for one in result.alternatives]
        if plot := _distribution_plot(f"{sink}: share applied within", named_lags):
            yield plot


def _distribution_plot(title: str, named_lags: Sequence[tuple[str, Latency]]) -> Plot | None:
    """Return the cumulative distribution of the lag; each line reaches 100 % at its largest lag."""
    bounds = [bound for _, lag in named_lags for bound, _ in lag.buckets]
    if not bounds:
        return None
    x = logarithmic_axis(bounds, "s")
    lines = tuple(
        Line(name, colour, *_cumulate(lag, x.low, x.high))
        for colour, (name, lag) in enumerate(named_lags)
        if lag.buckets
    )
    return Plot(title, x, linear_axis(100.0, "%", tight=True), lines)


def _cumulate(lag: Latency, low: float, high: float) -> tuple[list[float], list[float]]:
    total = sum(count for _, count in lag.buckets)
    xs, ys, cumulated = [low], [0.0], 0
    for bound, count in lag.buckets:
        cumulated += count
        xs.append(bound)
        ys.append(100.0 * cumulated / total)
    return [*xs, high], [*ys, 100.0]


def _time_plot(title: str, time: Axis, lines: Sequence[tuple[str, Line]]) -> Plot:
    unit = lines[0][0]
    plot_lines = tuple(line for _, line in lines)
    return Plot(title, time, _value_axis(unit, plot_lines), plot_lines)


def _value_axis(unit: str, lines: Sequence[Line]) -> Axis:
    peaks = [max((y for y in line.ys if isfinite(y)), default=0.0) for line in lines]
    lowest = min((peak for peak in peaks if peak > 0), default=inf)
    if unit not in ("bytes", "%") and max(peaks, default=0.0) > SPREAD_MAX * lowest:
        return logarithmic_axis([y for line in lines for y in line.ys if isfinite(y)], unit)
    return linear_axis(max(peaks, default=0.0), unit)


def _lines(
    owners: Sequence[str], series_lists: Sequence[Sequence[Series]], name: str
) -> list[tuple[str, Line]]:
    """Return unit and line of each owner with a series of that name; its position gives the colour."""
    return [
        (series.unit, Line(owner, colour, series.times_s, series.values))
        for colour, (owner, group) in enumerate(zip(owners, series_lists, strict=True))
        for series in group
        if series.name == name
    ]


def sink_names(result: Result) -> tuple[str, ...]:
    return unique_names(sink.name for alternative in result.alternatives for sink in alternative.sinks)


def sink_of(alternative: Alternative, name: str) -> SinkResult:
    """Return the sink of that name; an empty result if the alternative has none."""
    for sink in alternative.sinks:
        if sink.name == name:
            return sink
    return SinkResult(name, 0, 0, 0.0, Latency(0, {}, []))


def unique_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once, in the order of the first occurrences."""
    return tuple(dict.fromkeys(names))
