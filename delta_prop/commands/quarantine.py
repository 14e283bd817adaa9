"""`quarantine list`, `show`, `replay`, `drop`: what sinks have set aside, and what becomes of it.

The first two only read, beside a process that writes too; the others leave a request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from delta_prop.commands import edge
from delta_prop.commands.asking import ask, open_directory, waiting_requests
from delta_prop.dates import shown_time
from delta_prop.quarantine_file import QuarantineDamaged, read_all, read_kept
from delta_prop.quarantines import bring_back
from delta_prop.route.quarantine import Quarantine
from delta_prop_wire.errors import UsageError
from delta_prop_wire.jsonlines import delta_to_json
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.operator_requests import OperatorRequest
    from delta_prop.quarantine_file import EpochEnd, Kept
    from delta_prop.route.quarantine import SetAside
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.identity import Identity

OK = 0
_ANY = 1 << 62
_VECTOR_WIDTH = 28


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which deltas of which sink; none named: all that it rejected."""

    data: str
    sink: str
    offsets: tuple[int, ...] = ()
    all: bool = False


# --- looking


def quarantined(disk: Disk, log_id: bytes, epoch_end: EpochEnd) -> dict[str, Quarantine]:
    """What each sink has set aside, by its name. Raises QuarantineDamaged, OSError."""
    return {kept.sink: _filled(kept) for kept in read_all(disk, epoch_end) if kept.log_id == log_id}


def quarantine_told(disk: Disk, log: Identity, sink: str) -> str:
    """Describe how much a sink's quarantine holds, for people. Raises OSError."""
    try:
        kept = read_kept(disk, sink, log.epoch_end)
    except QuarantineDamaged:
        return "could not be read"
    records = [] if kept is None or kept.log_id != log.log_id else _filled(kept).records()
    if not records:
        return "was empty"
    rejected = sum(one.behind == one.offset for one in records)
    return f"had rejected: {rejected:,}, lined up behind that: {len(records) - rejected:,}"


def _filled(kept: Kept) -> Quarantine:
    quarantine = Quarantine(_ANY, _ANY)
    bring_back(quarantine, kept)
    return quarantine


def list_(data: str, *, sink: str | None, as_json: bool) -> int:
    """One line for each delta that is set aside. Raises UsageError, QuarantineDamaged, OSError."""
    disk, log = open_directory(data)
    found = quarantined(disk, log.log_id, log.epoch_end)
    asked = waiting_requests(disk, log.log_id)
    rows = [
        _told(name, one) | {"asked": _asked(asked, name, one)}
        for name, quarantine in found.items()
        if sink in (None, name)
        for one in quarantine.records()
    ]
    if as_json:
        edge.put_all(json.dumps(row, ensure_ascii=False) for row in rows)
        return OK
    edge.put(f"{'sink':16}  {'offset':>10}  {'since':24}  {'op':8}  {'vector':{_VECTOR_WIDTH}}  why")
    edge.put_all(_line(row) for row in rows)
    return OK


def show(data: str, sink: str, offset: int, *, as_json: bool) -> int:
    """One delta that is set aside, whole. Raises UsageError, QuarantineDamaged, OSError."""
    disk, log = open_directory(data)
    one = _require(_of_sink(disk, log, sink), sink, offset)
    told = _told(sink, one) | {"delta": delta_to_json(one.delta)}
    told |= {"dot": str(one.logged.batch.dot(one.row)), "parents": [_name(name) for name in one.parents]}
    told["asked"] = _asked(waiting_requests(disk, log.log_id), sink, one)
    if as_json:
        edge.put(json.dumps(told, ensure_ascii=False))
    else:
        edge.put_all(f"{name:10}  {_shown(value)}" for name, value in told.items() if value not in (None, []))
    return OK


def _told(sink: str, one: SetAside) -> dict[str, Any]:
    namespace, vector_id = one.vector
    return {
        "sink": sink,
        "offset": one.offset,
        "time": shown_time(one.at_us),
        "op": kind_name(one.logged.batch.kinds[one.row]),
        "namespace": namespace,
        "vector_id": vector_id,
        "reason": one.reason,
        "behind": None if one.behind == one.offset else one.behind,
    }


def _line(row: dict[str, Any]) -> str:
    why = row["reason"] or ("to be replayed" if row["behind"] is None else f"behind {row['behind']}")
    asked = "" if row["asked"] is None else f" ({row['asked']} asked for)"
    vector = f"{row['namespace']} {row['vector_id']}"
    return (
        f"{row['sink']:16}  {row['offset']:>10}  {row['time']:24}  {row['op']:8}  "
        f"{vector:{_VECTOR_WIDTH}}  {why}{asked}"
    )


def _asked(requests: Sequence[OperatorRequest], sink: str, one: SetAside) -> str | None:
    """What is asked for and will reach this delta, by itself or by what it waits for."""
    verbs = [request.verb for request in requests if request.sink == sink and request.names(one.behind)]
    if not verbs:
        return None
    return verbs[0] if one.reason is not None else "replay"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _name(name: object) -> str:
    return name.hex() if isinstance(name, bytes) else str(name)


def _of_sink(disk: Disk, log: Identity, sink: str) -> Quarantine:
    kept = read_kept(disk, sink, log.epoch_end)
    if kept is None or kept.log_id != log.log_id:
        known = ", ".join(sorted(one.sink for one in read_all(disk))) or "none"
        raise UsageError(f"nothing is kept of a quarantine of sink {sink!r}; sinks that have one: {known}")
    return _filled(kept)


def _require(quarantine: Quarantine, sink: str, offset: int) -> SetAside:
    if offset not in quarantine:
        held = ", ".join(str(one.offset) for one in quarantine.records()[:10]) or "none"
        raise UsageError(f"offset {offset} is not in the quarantine of sink {sink!r}; there are: {held}")
    return quarantine[offset]


# --- asking


def act(chosen: Chosen, verb: Literal["replay", "drop"]) -> int:
    """Have rejected deltas applied once more, or given up; what waits behind them follows.

    Raises UsageError, QuarantineDamaged, OSError.
    """
    if bool(chosen.offsets) == chosen.all:
        raise UsageError(f"quarantine {verb} {chosen.sink}: give offsets, or --all")
    disk, log = open_directory(chosen.data)
    quarantine = _of_sink(disk, log, chosen.sink)
    for offset in chosen.offsets:
        one = _require(quarantine, chosen.sink, offset)
        if one.behind != offset:
            raise UsageError(f"offset {offset} was not rejected, it waits behind {one.behind}: name that one")
        if verb == "drop" and one.reason is None:
            raise UsageError(f"offset {offset} was not rejected: replay it")
    count = len(chosen.offsets) or sum(one.behind == one.offset for one in quarantine.records())
    if not count:
        edge.confirm(f"nothing to {verb}: the quarantine of sink {chosen.sink!r} is empty")
        return OK
    waits = sum(
        one.behind != one.offset and (chosen.all or one.behind in chosen.offsets)
        for one in quarantine.records()
    )
    what = f"{verb} for sink {chosen.sink!r} (rejected: {count:,}, lined up behind that: {waits:,})"
    ask(chosen.data, verb, chosen.sink, tuple(sorted(set(chosen.offsets))), what)
    return OK
