"""Renders the lines of `top` from two samples of a server. Pure.

Rates are differences between the samples; the first screen has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop.commands.log_positions import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NAME_CHARS = 20


class StatusSample(NamedTuple):
    """State of a server at a moment in seconds; `status` and `sinks` as its HTTP port returns them."""

    at_s: float
    status: dict[str, Any]
    sinks: list[dict[str, Any]]


def render(
    now: StatusSample, before: StatusSample | None, *, name: str, width: int, height: int
) -> list[str]:
    """Return up to `height` lines of up to `width` characters; rows that do not fit are counted."""
    before = None if before is None or _is_starting(before) else before
    head = _render_header(now, before, name)
    if _is_starting(now):
        return [escape_unprintable(line)[:width] for line in head[:height]]
    rows_left = max(height - len(head) - 4, 2)
    peers = now.status["connections"]
    group_rows = min(len(now.status["groups"]), max(rows_left // 4, 1))
    rows_left -= group_rows + 2 if group_rows else 0
    sink_rows = min(len(now.sinks), max(rows_left // 2, rows_left - len(peers), 1))
    lines = [*head, "", *_render_sinks(now, before, sink_rows), *_render_groups(now, group_rows)]
    lines += ["", *_render_connections(now, before, max(height - len(lines) - 2, 1))]
    return [escape_unprintable(line)[:width].rstrip() for line in lines[:height]]


# --- the server as a whole


def _render_header(now: StatusSample, before: StatusSample | None, name: str) -> list[str]:
    status = now.status
    state = "ready" if status["reason"] is None else f"not ready: {status['reason']}"
    up = f", up {format_duration(status['uptime_s'])}" if "uptime_s" in status else ""
    title = f"delta-prop {status['version']} at {name}{up}: {state}"
    if _is_starting(now):
        return [title]
    log, queue, pressure, count = (status[part] for part in ("log", "queue", "pressure", "server"))
    rate = _Rates(now, before)
    nacks = ", ".join(f"{code} {number:,}" for code, number in sorted(count["nacks"].items()))
    limit = "" if pressure["rate_limit"] is None else f", up to {pressure['rate_limit']:,.0f}/s"
    by = f", by {pressure['paced_by']}" if pressure["paced_by"] else ""
    full = status.get("full")
    return [
        title,
        *([] if full is None else [f"full     {full['reason']}"]),
        f"log      offsets {log['start_offset']:,} to {log['next_offset']:,}, "
        f"high watermark {log['high_watermark']:,}; "
        f"{format_bytes(log['bytes'])} of {format_bytes(log['bytes_max'])}",
        f"in       {rate('deltas_in')} deltas/s  {rate.bytes('bytes_in')}/s  accepted "
        f"{status['accepted']:,}  duplicates {status['duplicates']:,}  refused {status['refused']:,}",
        f"out      {rate('deltas_out')} deltas/s  {rate.bytes('bytes_out')}/s"
        + (f"  nacks: {nacks}" if nacks else ""),
        f"queue    {queue['depth']:,} of {queue['capacity']:,}  waiting for dependencies "
        f"{status['pending']['pending_deltas']:,}  pressure: {pressure['level']}{limit}{by}",
    ]


def _is_starting(sample: StatusSample) -> bool:
    """True until the server has numbers."""
    return "log" not in sample.status or sample.status["server"] is None


class _Rates:
    """Growth of counters per second."""

    def __init__(self, now: StatusSample, before: StatusSample | None) -> None:
        self._now = now.status["server"]
        self._before = None if before is None else before.status["server"]
        self._elapsed_s = 0.0 if before is None else now.at_s - before.at_s

    def __call__(self, counter: str) -> str:
        grown = self._rate(counter)
        return f"{'-' if grown is None else f'{grown:,.0f}':>9}"

    def bytes(self, counter: str) -> str:
        """Return the growth of a counter of bytes."""
        grown = self._rate(counter)
        return f"{'-' if grown is None else format_bytes(grown):>9}"

    def _rate(self, counter: str) -> float | None:
        if self._before is None or self._elapsed_s <= 0:
            return None
        grown: int = self._now[counter] - self._before[counter]
        return max(grown, 0) / self._elapsed_s  # a restart resets the counter


# --- sinks and connections


def _render_sinks(now: StatusSample, before: StatusSample | None, rows_max: int) -> list[str]:
    heads = (
        f"{'sink':{_NAME_CHARS}}  {'state':13}  {'offset':>13}  {'lag':>11}  {'lag time':>8}  "
        f"{'deltas/s':>9}  quarantined"
    )
    earlier = {} if before is None else {one["name"]: one["applied_offset"] for one in before.sinks}
    lines = [heads]
    for one in _select_worst(now.sinks, rows_max):
        rate = "-"
        previous = earlier.get(one["name"])
        if before is not None and previous is not None:
            rate = f"{max(one['applied_offset'] - previous, 0) / max(now.at_s - before.at_s, 1e-9):,.0f}"
        note = f"  {one['reason']}" if one["reason"] else ""
        lines.append(
            f"{_format_name(one['name'])}  {one['state']:13}  {one['applied_offset']:>13,}  "
            f"{one['lag']:>11,}  {format_lag(one['lag_s']):>8}  {rate:>9}  {one['quarantined']:>11,}{note}"
        )
    return lines + _render_more(len(now.sinks), rows_max)


def _render_connections(now: StatusSample, before: StatusSample | None, rows_max: int) -> list[str]:
    peers = now.status["connections"]
    subscribed, catching_up = (sum(one[what] for one in peers) for what in ("subscribed", "catching_up"))
    waiting = sum(one.get("standing_by", False) for one in peers)
    standby = f", {waiting:,} standing by" if waiting else ""
    lines = [f"{len(peers):,} connections, {subscribed:,} subscribed, {catching_up:,} catching up{standby}"]
    if not peers:
        return lines
    heads = (
        f"{'client':{_NAME_CHARS}}  {'address':22}  {'token':12}  {'since':>8}  {'open':>6}  {'lag':>11}  "
        "lag time"
    )
    for one in _select_worst(peers, rows_max - 1):
        lines.append(
            f"{_format_name(one['client'] or '-')}  {one['address']:22}  {(one['token'] or '-'):12.12}  "
            f"{format_duration(one['seconds']):>8}  {one['pending_frames']:>6,}  "
            f"{'stands by' if one.get('standing_by') else _format_count(one['lag']):>11}  "
            f"{format_lag(one['lag_s']):>8}"
        )
    return [lines[0], heads, *lines[1:], *_render_more(len(peers), rows_max - 1)]


def _render_groups(now: StatusSample, rows_max: int) -> list[str]:
    groups = now.status["groups"]
    if not groups:
        return []
    lines = ["", f"{'group':{_NAME_CHARS}}  {'read for':13}  {'offset':>13}  {'lag':>11}  lag time"]
    for one in _select_worst(groups, rows_max):
        waiting = f", {one['standing_by']:,} wait" if one.get("standing_by") else ""
        state = ("yes" if one["has_member"] else "no") + waiting
        lines.append(
            f"{_format_name(one['name'])}  {state:13}  {_format_count(one['offset']):>13}  "
            f"{_format_count(one['lag']):>11}  {format_lag(one['lag_s']):>8}"
        )
    return lines + _render_more(len(groups), rows_max)


def _select_worst(rows: Sequence[dict[str, Any]], rows_max: int) -> list[dict[str, Any]]:
    """Return the rows in order; if they do not fit, those with the greatest lag."""
    if len(rows) <= rows_max:
        return list(rows)
    return sorted(rows, key=lambda one: -(one["lag"] or 0))[: max(rows_max - 1, 1)]


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


def _format_name(name: str) -> str:
    return f"{escape_unprintable(name):{_NAME_CHARS}.{_NAME_CHARS}}"


def _format_count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
