"""What `top` draws: two looks at a server, made into lines. Pure.

Rates are differences between the looks; the first screen has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop.commands.places import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NAME_CHARS = 20


class Shot(NamedTuple):
    """A look at a moment, in seconds; `status` and `sinks` as the HTTP port tells them."""

    at_s: float
    status: dict[str, Any]
    sinks: list[dict[str, Any]]


def screen(now: Shot, before: Shot | None, *, name: str, width: int, height: int) -> list[str]:
    """The lines, no longer than `width` and no more than `height`; what does not fit is counted."""
    before = None if before is None or _is_starting(before) else before
    head = _head(now, before, name)
    if _is_starting(now):
        return [printable(line)[:width] for line in head[:height]]
    room = max(height - len(head) - 4, 2)
    peers = now.status["connections"]
    groups_room = min(len(now.status["groups"]), max(room // 4, 1))
    room -= groups_room + 2 if groups_room else 0
    sinks_room = min(len(now.sinks), max(room // 2, room - len(peers), 1))
    lines = [*head, "", *_sinks(now, before, sinks_room), *_groups(now, groups_room)]
    lines += ["", *_connections(now, before, max(height - len(lines) - 2, 1))]
    return [printable(line)[:width].rstrip() for line in lines[:height]]


# --- the server as a whole


def _head(now: Shot, before: Shot | None, name: str) -> list[str]:
    status = now.status
    state = "ready" if status["reason"] is None else f"not ready: {status['reason']}"
    up = f", up {shown_s(status['uptime_s'])}" if "uptime_s" in status else ""
    title = f"delta-prop {status['version']} at {name}{up}: {state}"
    if _is_starting(now):
        return [title]
    log, queue, pressure, count = (status[part] for part in ("log", "queue", "pressure", "server"))
    rate = _Rates(now, before)
    nacks = ", ".join(f"{code} {number:,}" for code, number in sorted(count["nacks"].items()))
    limit = "" if pressure["rate_limit"] is None else f", {pressure['rate_limit']:,.0f}/s at most"
    by = f", by {pressure['paced_by']}" if pressure["paced_by"] else ""
    full = status.get("full")
    return [
        title,
        *([] if full is None else [f"full     {full['reason']}"]),
        f"log      offsets {log['first_offset']:,} to {log['next_offset']:,}, visible {log['visible']:,}; "
        f"{shown_bytes(log['bytes'])} of {shown_bytes(log['bytes_max'])}",
        f"in       {rate('deltas_in')} deltas/s  {rate.bytes('bytes_in')}/s  accepted "
        f"{status['accepted']:,}  repeated {status['duplicates']:,}  refused {status['refused']:,}",
        f"out      {rate('deltas_out')} deltas/s  {rate.bytes('bytes_out')}/s"
        + (f"  nacks: {nacks}" if nacks else ""),
        f"queue    {queue['depth']:,} of {queue['capacity']:,}  waiting for their causes "
        f"{status['pending']['pending_deltas']:,}  pressure: {pressure['level']}{limit}{by}",
    ]


def _is_starting(shot: Shot) -> bool:
    """Whether there are no numbers yet."""
    return "log" not in shot.status or shot.status["server"] is None


class _Rates:
    """Counters' growth a second."""

    def __init__(self, now: Shot, before: Shot | None) -> None:
        self._now = now.status["server"]
        self._before = None if before is None else before.status["server"]
        self._s = 0.0 if before is None else now.at_s - before.at_s

    def __call__(self, counter: str) -> str:
        grown = self._grown(counter)
        return f"{'-' if grown is None else f'{grown:,.0f}':>9}"

    def bytes(self, counter: str) -> str:
        """The same in bytes."""
        grown = self._grown(counter)
        return f"{'-' if grown is None else shown_bytes(grown):>9}"

    def _grown(self, counter: str) -> float | None:
        if self._before is None or self._s <= 0:
            return None
        grown: int = self._now[counter] - self._before[counter]
        return max(grown, 0) / self._s  # after a restart it begins anew


# --- sinks and connections


def _sinks(now: Shot, before: Shot | None, room: int) -> list[str]:
    heads = (
        f"{'sink':{_NAME_CHARS}}  {'state':13}  {'offset':>13}  {'lag':>11}  {'lag time':>8}  "
        f"{'deltas/s':>9}  quarantined"
    )
    earlier = {} if before is None else {one["name"]: one["applied"] for one in before.sinks}
    lines = [heads]
    for one in _worst(now.sinks, room):
        rate = "-"
        was = earlier.get(one["name"])
        if before is not None and was is not None:
            rate = f"{max(one['applied'] - was, 0) / max(now.at_s - before.at_s, 1e-9):,.0f}"
        note = f"  {one['reason']}" if one["reason"] else ""
        lines.append(
            f"{_name(one['name'])}  {one['state']:13}  {one['applied']:>13,}  {one['lag']:>11,}  "
            f"{shown_lag(one['lag_s']):>8}  {rate:>9}  {one['quarantined']:>11,}{note}"
        )
    return lines + _more(len(now.sinks), room)


def _connections(now: Shot, before: Shot | None, room: int) -> list[str]:
    peers = now.status["connections"]
    subscribed, behind = (sum(one[what] for one in peers) for what in ("subscribed", "behind"))
    waiting = sum(one.get("standing_by", False) for one in peers)
    stands = f", {waiting:,} standing by" if waiting else ""
    lines = [f"{len(peers):,} connections, {subscribed:,} subscribed, {behind:,} behind{stands}"]
    if not peers:
        return lines
    heads = (
        f"{'client':{_NAME_CHARS}}  {'address':22}  {'token':12}  {'since':>8}  {'open':>6}  {'lag':>11}  "
        "lag time"
    )
    for one in _worst(peers, room - 1):
        lines.append(
            f"{_name(one['client'] or '-')}  {one['address']:22}  {(one['token'] or '-'):12.12}  "
            f"{shown_s(one['seconds']):>8}  {one['open_frames']:>6,}  "
            f"{'stands by' if one.get('standing_by') else _count(one['lag']):>11}  "
            f"{shown_lag(one['lag_s']):>8}"
        )
    return [lines[0], heads, *lines[1:], *_more(len(peers), room - 1)]


def _groups(now: Shot, room: int) -> list[str]:
    groups = now.status["groups"]
    if not groups:
        return []
    lines = ["", f"{'group':{_NAME_CHARS}}  {'read for':13}  {'offset':>13}  {'lag':>11}  lag time"]
    for one in _worst(groups, room):
        waiting = f", {one['standing_by']:,} wait" if one.get("standing_by") else ""
        state = ("yes" if one["has_member"] else "no") + waiting
        lines.append(
            f"{_name(one['name'])}  {state:13}  {_count(one['offset']):>13}  {_count(one['lag']):>11}  "
            f"{shown_lag(one['lag_s']):>8}"
        )
    return lines + _more(len(groups), room)


def _worst(rows: Sequence[dict[str, Any]], room: int) -> list[dict[str, Any]]:
    """As they come; where they do not fit, those with the greatest lag."""
    if len(rows) <= room:
        return list(rows)
    return sorted(rows, key=lambda one: -(one["lag"] or 0))[: max(room - 1, 1)]


def _more(count: int, room: int) -> list[str]:
    return [] if count <= room else [f"and {count - max(room - 1, 1):,} more"]


# --- values


def shown_bytes(size: float) -> str:
    """A size with its unit."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"


def shown_s(seconds: float) -> str:
    """A time with its unit."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6_000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.0f} h" if seconds < 360_000 else f"{seconds / 86_400:,.0f} d"


def shown_lag(seconds: float | None) -> str:
    """Return a lag in seconds as text."""
    return "-" if seconds is None else shown_s(seconds)


def _name(name: str) -> str:
    return f"{printable(name):{_NAME_CHARS}.{_NAME_CHARS}}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
