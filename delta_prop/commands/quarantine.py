"""`quarantine list`, `show`, `replay`, `drop`: shows deltas that sinks rejected or hold, and releases them.

`list` and `show` only read, also while a process writes; the others leave a request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from delta_prop.commands.tables import Table, name_of
from delta_prop.delivery.held_deltas import QuarantinedDelta
from delta_prop.delivery.operator_requests import OperatorRequest
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.quarantine_file import read_all, read_stored
from delta_prop.directory.request_client import read_pending_requests, submit_request
from delta_prop.directory.stored_partitions import (
    StoredPartition,
    find_partition,
    have_column,
    list_partitions,
)
from delta_prop.directory.stored_sinks import read_quarantines, to_quarantine
from delta_prop.platform import system
from delta_prop.platform.dates import format_time
from delta_prop_wire.errors import UsageError
from delta_prop_wire.jsonlines import delta_to_json
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from argparse import Namespace

OK = 0
_VECTOR_WIDTH = 28


# --- reading


def list_(options: Namespace) -> int:
    """Print one line for each quarantined delta. Raises UsageError, QuarantineCorrupted, OSError."""
    partitions = list_partitions(options.data, options.stream, options.partition)
    rows = [row for partition in partitions for row in _read_rows(partition, options.sink)]
    if options.json:
        system.put_all(json.dumps(row, ensure_ascii=False) for row in rows)
        return OK
    table = Table(has_partitions=have_column(partitions))
    table.put_head(f"{'sink':16}  {'offset':>10}  {'since':24}  {'op':8}  {'vector':{_VECTOR_WIDTH}}  why")
    for row in rows:
        table.put(row, _format_row(row))
    return OK


def _read_rows(partition: StoredPartition, sink: str | None) -> Iterator[dict[str, Any]]:
    identity = partition.read_identity()
    quarantines = read_quarantines(partition.disk, identity.log_id, identity.epoch_end)
    requests = read_pending_requests(partition.root, identity.log_id)
    for name, quarantine in quarantines.items():
        if sink in (None, name):
            for record in quarantine.records():
                requested = {"requested": _pending_verb(requests, name, record)}
                yield _to_json(name, record) | requested | partition.fields


def show(options: Namespace) -> int:
    """Print one quarantined delta in full. Raises UsageError, QuarantineCorrupted, OSError."""
    partition, sink = find_partition(options.data, name_of(options)), options.sink
    record = _find_record(_read_quarantine(partition, sink), sink, options.offset)
    fields = _to_json(sink, record) | {"delta": delta_to_json(record.delta)}
    fields["dot"] = str(record.logged.batch.dot(record.row))
    fields["parents"] = [one.hex() if isinstance(one, bytes) else str(one) for one in record.parents]
    requests = read_pending_requests(partition.root, partition.read_identity().log_id)
    fields["requested"] = _pending_verb(requests, sink, record)
    fields |= {} if partition.is_default and not options.json else partition.fields
    if options.json:
        system.put(json.dumps(fields, ensure_ascii=False))
    else:
        system.put_all(
            f"{name:10}  {_format_value(value)}" for name, value in fields.items() if value not in (None, [])
        )
    return OK


def _to_json(sink: str, record: QuarantinedDelta) -> dict[str, Any]:
    namespace, vector_id = record.vector
    return {
        "sink": sink,
        "offset": record.offset,
        "time": format_time(record.at_us),
        "op": kind_name(record.logged.batch.kinds[record.row]),
        "namespace": namespace,
        "vector_id": vector_id,
        "reason": record.reason,
        "blocked_by": record.blocked_by if record.is_blocked else None,
    }


def _format_row(row: dict[str, Any]) -> str:
    reason = row["reason"] or (
        "to be replayed" if row["blocked_by"] is None else f"blocked by {row['blocked_by']}"
    )
    request = "" if row["requested"] is None else f" ({row['requested']} requested)"
    vector = f"{row['namespace']} {row['vector_id']}"
    return (
        f"{row['sink']:16}  {row['offset']:>10}  {row['time']:24}  {row['op']:8}  "
        f"{vector:{_VECTOR_WIDTH}}  {reason}{request}"
    )


def _pending_verb(requests: Sequence[OperatorRequest], sink: str, record: QuarantinedDelta) -> str | None:
    """Return the pending request for this delta: replay or drop, or None.

    A request for the delta that blocks this one, even a drop, is followed by a replay of this one.
    """
    verbs = [
        request.verb for request in requests if request.sink == sink and request.matches(record.blocked_by)
    ]
    if not verbs:
        return None
    return verbs[0] if record.reason is not None else "replay"


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_quarantine(partition: StoredPartition, sink: str) -> Quarantine:
    disk, identity = partition.disk, partition.read_identity()
    stored = read_stored(disk, sink, identity.epoch_end)
    if stored is None or stored.log_id != identity.log_id:
        known = ", ".join(sorted(quarantine.sink for quarantine in read_all(disk))) or "none"
        raise UsageError(
            f"sink {sink!r}: it has no quarantine{partition.suffix}: name a sink that has one ({known})"
        )
    return to_quarantine(stored)


def _find_record(quarantine: Quarantine, sink: str, offset: int) -> QuarantinedDelta:
    if offset not in quarantine:
        offsets = ", ".join(str(record.offset) for record in quarantine.records()[:10]) or "none"
        raise UsageError(
            f"offset {offset}: it is not in the quarantine of sink {sink!r}: name one of its offsets "
            f"({offsets})"
        )
    return quarantine[offset]


# --- requests


def submit_action(options: Namespace) -> int:
    """Request that rejected deltas are applied once more, or dropped; the deltas that they block follow.

    Raises UsageError, QuarantineCorrupted, OSError.
    """
    verb, sink, offsets = options.quarantine_verb, options.sink, options.offsets
    if bool(offsets) == options.all:
        raise UsageError(f"quarantine {verb} {sink}: give offsets, or --all")
    partition = find_partition(options.data, name_of(options))
    quarantine = _read_quarantine(partition, sink)
    for offset in offsets:
        record = _find_record(quarantine, sink, offset)
        if record.is_blocked:
            raise UsageError(
                f"offset {offset}: it was not rejected, but is blocked by {record.blocked_by}: name that one"
            )
        if verb == "drop" and record.reason is None:
            raise UsageError(f"offset {offset}: it was not rejected, but waits to be replayed: replay it")
    records = quarantine.records()
    count = len(offsets) or sum(not record.is_blocked for record in records)
    if not count:
        system.confirm(f"nothing to {verb}: the quarantine of sink {sink!r}{partition.suffix} is empty")
        return OK
    blocked = sum(record.is_blocked and (options.all or record.blocked_by in offsets) for record in records)
    counts = f"(rejected: {count:,}, blocked by them: {blocked:,})"
    subject = f"{verb} for sink {sink!r}{partition.suffix} {counts}"
    submit_request(partition, verb, sink, tuple(sorted(set(offsets))), subject=subject)
    return OK
