"""Renders the lines of `top` from two samples of a server. Pure.

Rates are differences between the samples; the first screen has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from delta_prop.directory.log_positions import escape_unprintable
from delta_prop.server.server_status import label_of
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NAME_CHARS = 20


class StatusSample(NamedTuple):
    """State of a server at `at_s`, in seconds; `status` and `sinks` as its HTTP port returns them."""

    at_s: float
    status: dict[str, Any]
    sinks: list[dict[str, Any]]


def render(
    now: StatusSample, before: StatusSample | None, *, name: str, width: int, height: int
) -> list[str]:
    """Return up to `height` lines of up to `width` characters.

    If not all rows of a table fit, its last line says how many are left out.
    """
    before = None if before is None or _is_starting(before) else before
    header = _render_header(now, before, name)
    if _is_starting(now):
        return [escape_unprintable(line)[:width] for line in header[:height]]
    rows_left = max(height - len(header) - 4, 2)
    connections = now.status["connections"]
    group_rows = min(len(now.status["groups"]), max(rows_left // 4, 1))
    rows_left -= group_rows + 2 if group_rows else 0
    partitions = _find_other_partitions(now)
    partition_rows = min(len(partitions), max(rows_left // 4, 1))
    rows_left -= partition_rows + 2 if partition_rows else 0
    sink_rows = min(len(now.sinks), max(rows_left // 2, rows_left - len(connections), 1))
    lines = [*header, *_render_partitions(now, before, partition_rows), ""]
    lines += [*_render_sinks(now, before, sink_rows), *_render_groups(now, group_rows)]
    lines += ["", *_render_connections(now, before, max(height - len(lines) - 2, 1))]
    return [escape_unprintable(line)[:width].rstrip() for line in lines[:height]]


# --- the server as a whole


def _render_header(now: StatusSample, before: StatusSample | None, name: str) -> list[str]:
    status = now.status
    state = "ready" if status["reason"] is None else f"not ready: {status['reason']}"
    uptime = f", up {format_duration(status['uptime_s'])}" if "uptime_s" in status else ""
    title = f"delta-prop {status['version']} at {name}{uptime}: {state}"
    if _is_starting(now):
        return [title]
    log, queue, pressure, server = (status[part] for part in ("log", "queue", "pressure", "server"))
    rate = _Rates(now, before)
    nacks = ", ".join(f"{code} {count:,}" for code, count in sorted(server["nacks"].items()))
    limit = "" if pressure["rate_limit"] is None else f", up to {pressure['rate_limit']:,.0f}/s"
    paced_by = f", by {pressure['paced_by']}" if pressure["paced_by"] else ""
    full = status.get("full")
    closed = sum(stream["partitions"] - len(stream["open"]) for stream in status["streams"])
    return [
        title,
        *([] if full is None else [f"full     {full['reason']}"]),
        f"log      {DEFAULT_STREAM}: offsets {log['start_offset']:,} to {log['next_offset']:,}, "
        f"high watermark {log['high_watermark']:,}; "
        f"{format_bytes(log['bytes'])} of {format_bytes(log['bytes_max'])}",
        f"in       {rate('deltas_in')} deltas/s  {rate('bytes_in', format_bytes)}/s  accepted "
        f"{status['accepted']:,}  duplicates {status['duplicates']:,}  refused {status['refused']:,}",
        f"out      {rate('deltas_out')} deltas/s  {rate('bytes_out', format_bytes)}/s"
        + (f"  nacks: {nacks}" if nacks else ""),
        f"queue    {DEFAULT_STREAM}: {queue['depth']:,} of {queue['capacity']:,}  waiting for dependencies "
        f"{status['pending']['pending_deltas']:,}  pressure: {pressure['level']}{limit}{paced_by}",
        *([] if not closed else [f"closed   {closed:,} partitions are not open: their groups are not shown"]),
    ]


def _is_starting(sample: StatusSample) -> bool:
    """True until the server reports its counters."""
    return "log" not in sample.status or sample.status["server"] is None


class _Rates:
    """Growth of counters per second, as text."""

    def __init__(self, now: StatusSample, before: StatusSample | None) -> None:
        self._now = now.status["server"]
        self._before = None if before is None else before.status["server"]
        self._elapsed_s = 0.0 if before is None else now.at_s - before.at_s

    def __call__(self, counter: str, format_: Callable[[float], str] = "{:,.0f}".format) -> str:
        if self._before is None or self._elapsed_s <= 0:
            return f"{'-':>9}"
        growth = self._now[counter] - self._before[counter]
        return f"{format_(max(growth, 0) / self._elapsed_s):>9}"  # a restart resets the counter


# --- partitions, sinks and connections


def _find_other_partitions(sample: StatusSample) -> list[dict[str, Any]]:
    """Return the open partitions of all streams but the default one."""
    streams = sample.status["streams"]
    return [
        each | {"name": f"{stream['name']}/{each['partition']}"}
        for stream in streams
        for each in stream["open"]
        if stream["name"] != DEFAULT_STREAM
    ]


def _render_partitions(now: StatusSample, before: StatusSample | None, rows_max: int) -> list[str]:
    partitions = _find_other_partitions(now)
    if not partitions:
        return []
    partitions_before = [] if before is None else _find_other_partitions(before)
    counts_before = {each["name"]: each["accepted"] for each in partitions_before}
    lines = [
        "",
        f"{'partition':{_NAME_CHARS}}  {'start':>13}  {'next':>13}  {'log':>11}  {'accepted':>13}  deltas/s",
    ]
    for each in _select_most(partitions, rows_max, "accepted"):
        rate = "-"
        if before is not None and each["name"] in counts_before:
            growth = max(each["accepted"] - counts_before[each["name"]], 0)  # it may have opened again
            rate = f"{growth / max(now.at_s - before.at_s, 1e-9):,.0f}"
        lines.append(
            f"{_format_name(each['name'])}  {each['start_offset']:>13,}  {each['next_offset']:>13,}  "
            f"{format_bytes(each['bytes']):>11}  {each['accepted']:>13,}  {rate:>8}"
        )
    return lines + _render_more(len(partitions), rows_max)


def _render_sinks(now: StatusSample, before: StatusSample | None, rows_max: int) -> list[str]:
    sinks_before = [] if before is None else before.sinks
    offsets_before = {_full_name(sink): sink["applied_offset"] for sink in sinks_before}
    lines = [
        f"{'sink':{_NAME_CHARS}}  {'state':13}  {'offset':>13}  {'lag':>11}  {'lag time':>8}  "
        f"{'deltas/s':>9}  quarantined"
    ]
    for sink in _select_most(now.sinks, rows_max):
        rate = "-"
        offset_before = offsets_before.get(_full_name(sink))
        if before is not None and offset_before is not None:
            applied = max(sink["applied_offset"] - offset_before, 0)
            rate = f"{applied / max(now.at_s - before.at_s, 1e-9):,.0f}"
        note = f"  {sink['reason']}" if sink["reason"] else ""
        lines.append(
            f"{_format_name(_full_name(sink))}  {sink['state']:13}  {sink['applied_offset']:>13,}  "
            f"{sink['lag']:>11,}  {format_lag(sink['lag_s']):>8}  {rate:>9}  {sink['quarantined']:>11,}{note}"
        )
    return lines + _render_more(len(now.sinks), rows_max)


def _render_connections(now: StatusSample, before: StatusSample | None, rows_max: int) -> list[str]:
    connections = now.status["connections"]
    subscribed, catching_up, standby_count = (
        sum(connection.get(key, False) for connection in connections)
        for key in ("subscribed", "catching_up", "standing_by")
    )
    standby = f", {standby_count:,} standing by" if standby_count else ""
    lines = [
        f"{len(connections):,} connections, {subscribed:,} subscribed, {catching_up:,} catching up{standby}"
    ]
    if not connections:
        return lines
    lines.append(
        f"{'client':{_NAME_CHARS}}  {'address':22}  {'token':12}  {'since':>8}  {'open':>6}  {'lag':>11}  "
        "lag time"
    )
    for connection in _select_most(connections, rows_max - 1):
        lag = "stands by" if connection.get("standing_by") else _format_count(connection["lag"])
        lines.append(
            f"{_format_name(connection['client'] or '-')}  {connection['address']:22}  "
            f"{(connection['token'] or '-'):12.12}  {format_duration(connection['seconds']):>8}  "
            f"{connection['pending_frames']:>6,}  {lag:>11}  {format_lag(connection['lag_s']):>8}"
        )
    return lines + _render_more(len(connections), rows_max - 1)


def _render_groups(now: StatusSample, rows_max: int) -> list[str]:
    groups = now.status["groups"]
    if not groups:
        return []
    lines = ["", f"{'group':{_NAME_CHARS}}  {'read for':13}  {'offset':>13}  {'lag':>11}  lag time"]
    for group in _select_most(groups, rows_max):
        standby = f", {group['standing_by']:,} wait" if group.get("standing_by") else ""
        state = ("yes" if group["has_member"] else "no") + standby
        lines.append(
            f"{_format_name(_full_name(group))}  {state:13}  {_format_count(group['offset']):>13}  "
            f"{_format_count(group['lag']):>11}  {format_lag(group['lag_s']):>8}"
        )
    return lines + _render_more(len(groups), rows_max)


def _select_most(rows: Sequence[dict[str, Any]], rows_max: int, key: str = "lag") -> list[dict[str, Any]]:
    """Return all rows in order if they fit, else those with the greatest `key`, one row less than fit."""
    if len(rows) <= rows_max:
        return list(rows)
    return sorted(rows, key=lambda row: -(row[key] or 0))[: max(rows_max - 1, 1)]


def _render_more(count: int, rows_max: int) -> list[str]:
    return [] if count <= rows_max else [f"and {count - max(rows_max - 1, 1):,} more"]


# --- values


def format_bytes(size: float) -> str:
    """Return a size as text with its unit."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def format_duration(seconds: float) -> str:
    """Return a span as text with its unit."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6_000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.0f} h" if seconds < 360_000 else f"{seconds / 86_400:,.0f} d"


def format_lag(seconds: float | None) -> str:
    """Return a lag in seconds as text."""
    return "-" if seconds is None else format_duration(seconds)


def _full_name(row: dict[str, Any]) -> str:
    """Return the name of a sink or group, after its partition unless that is the default one."""
    return f"{label_of(row)}{row['name']}"


def _format_name(name: str) -> str:
    return f"{escape_unprintable(name):{_NAME_CHARS}.{_NAME_CHARS}}"


def _format_count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
