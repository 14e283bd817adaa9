"""The state of sinks and groups in a data directory: cursors, quarantines, requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delta_prop.delivery.cursors import read_cursors
from delta_prop.delivery.group_cursor import read_groups
from delta_prop.delivery.quarantine import Quarantine
from delta_prop.delivery.quarantine_file import (
    EpochEnd,
    QuarantineCorrupted,
    StoredQuarantine,
    read_all,
    read_stored,
)
from delta_prop.delivery.quarantines import restore_quarantine
from delta_prop.directory.request_client import read_pending_requests
from delta_prop.platform import system
from delta_prop_broker.disk import Disk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.segments.identity import Identity
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.directory.stored_partitions import StoredPartition

_UNBOUNDED = 1 << 62


def read_quarantines(disk: Disk, log_id: bytes, epoch_end: EpochEnd) -> dict[str, Quarantine]:
    """Return the quarantines by the names of their sinks. Raises QuarantineCorrupted, OSError."""
    return {
        stored.sink: to_quarantine(stored) for stored in read_all(disk, epoch_end) if stored.log_id == log_id
    }


def describe_quarantine(disk: Disk, identity: Identity, sink: str) -> str:
    """Return a predicate such as "was empty" for a sentence about a sink's quarantine. Raises OSError."""
    try:
        stored = read_stored(disk, sink, identity.epoch_end)
    except QuarantineCorrupted:
        return "could not be read"
    records = [] if stored is None or stored.log_id != identity.log_id else to_quarantine(stored).records()
    if not records:
        return "was empty"
    rejected = sum(not record.is_blocked for record in records)
    return f"held {rejected:,} rejected deltas and {len(records) - rejected:,} blocked by them"


def read_sinks(partition: StoredPartition, log: DurableLog) -> list[dict[str, Any]]:
    """Return every sink and group with a cursor beside a partition's log, and its lag. Raises OSError."""
    disk = partition.disk
    quarantines = read_quarantines(disk, log.log_id, log.epoch_end)
    requests = read_pending_requests(partition.root, log.log_id)
    entries: list[dict[str, Any]] = []
    for name, cursor in sorted(read_cursors(disk, log.log_id).items()):
        entry: dict[str, Any] = {
            "name": name,
            "kind": "sink",
            "offset": cursor.processed,
            "required": cursor.required,
            "rebuilding": cursor.rebuilding,
            "paused": cursor.paused,
            "quarantined": len(quarantines.get(name, ())),
        }
        verbs = [request.verb for request in requests if request.sink == name]
        verbs += ["rebuild"] if cursor.rebuild_asked else []
        entries.append(entry | ({"requested": list(dict.fromkeys(verbs))} if verbs else {}))
    for name, offset in read_groups(disk, log.log_id).items():
        entry = {"name": name, "kind": "group", "offset": None, "required": False}
        entry |= {"corruption": str(offset)} if isinstance(offset, UsageError) else {"offset": offset}
        entries.append(entry)
    return [entry | _measure_lag(log, entry["offset"]) | partition.fields for entry in entries]


def _measure_lag(log: DurableLog, offset: int | None) -> dict[str, Any]:
    """Return the lag of a reader at an offset: the rows that it has not read, and the age in seconds of the
    oldest of them by this machine's clock.
    """
    if offset is None:
        return {"lag": None, "lag_s": None}
    if offset >= log.high_watermark:
        return {"lag": 0, "lag_s": 0.0}
    time_us = log.append_time(offset)
    age_s = None if time_us is None else round(max(system.wall_us() - time_us, 0) / 1e6, 3)
    return {"lag": log.high_watermark - offset, "lag_s": age_s}


def to_quarantine(stored: StoredQuarantine) -> Quarantine:
    """Return the quarantine that a file stores."""
    quarantine = Quarantine(_UNBOUNDED, _UNBOUNDED)
    restore_quarantine(quarantine, stored)
    return quarantine
