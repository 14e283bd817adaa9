"""`status`: prints the state of a log on disk, or of each of several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from delta_prop.commands.sinks import corruption_of_cursors
from delta_prop.commands.tables import Table
from delta_prop.directory.readonly_log import snapshot_to_json
from delta_prop.directory.stored_partitions import StoredPartition, find_partition, list_partitions
from delta_prop.directory.stored_sinks import read_quarantines, read_sinks
from delta_prop.platform import system
from delta_prop.platform.dates import format_time
from delta_prop.server.job_files import JobFiles
from delta_prop.server.server_status import lags_of
from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.log.directory import read_times
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.recovery.recovery import RecoveryReport
from delta_prop_broker.segments.paths import LOCK_PATH

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1


# --- status


def show_status(options: Namespace) -> int:
    """Print the state of a log, or of each of several; return exit status 1 if a corruption is found.

    Not all frames are read: only `log verify` does that. Raises UsageError, FormatUnknown, OSError.
    """
    data: str = options.data
    try:
        partitions, fault = list_partitions(data, options.stream, options.partition), None
    except LogCorrupted as corruption:  # of the catalogue
        partitions, fault = [find_partition(data)], str(corruption)
    writer = system.find_lock_holder(data, LOCK_PATH)
    rows = [_read_status(partition, writer, fault) for partition in partitions]
    if options.json:
        system.put_all(map(json.dumps, rows))
    elif len(rows) == 1:
        _put_one(rows[0], has_name=not partitions[0].is_default)
    else:
        _put_several(rows, data, writer)
    return OK if all(row["health"] == "intact" for row in rows) else FAILED


def _read_status(partition: StoredPartition, writer: int | None, fault: str | None) -> dict[str, Any]:
    """Describe a log; `fault`: of the directory."""
    fields: dict[str, Any] = {"data": partition.data} | partition.fields
    fields |= {"health": "intact", "writer": writer}
    try:
        with partition.open_log() as (_, log, report):
            fields |= _status_to_json(partition, log, report)
    except LogCorrupted as corruption:
        fields |= {"health": "corrupted", "corruption": str(corruption)}
    return fields if fault is None else fields | {"health": "corrupted", "corruption": fault}


def _put_one(row: dict[str, Any], *, has_name: bool) -> None:
    """Print a line for each field. `has_name`: print the names of the stream and the partition too."""
    lags = dict(flatten({"lags": row.get("lags", {})})) if "log_id" in row else {}
    hidden = {"lags"} if has_name else {"lags", "stream", "partition"}
    lines = {name: value for name, value in row.items() if name not in hidden} | lags
    system.put_all(f"{name:13}  {format_value(value)}" for name, value in lines.items())


def _put_several(rows: list[dict[str, Any]], data: str, writer: int | None) -> None:
    """Print a line for each partition."""
    system.put(f"data {data}  writer {format_value(writer)}  partitions {len(rows):,}")
    table = Table(has_partitions=True)
    table.put_head(
        f"{'health':9}  {'start':>12}  {'next':>12}  {'bytes':>14}  {'segments':>8}  {'sinks':>5}  "
        f"{'lag':>12}  {'quarantined':>11}  corruption"
    )
    for row in rows:
        numbers = ""
        if "log_id" in row:
            lag = max([lag["deltas"] for lag in row["lags"].values()], default=0)
            quarantined = sum(row["quarantined"].values())
            numbers = (
                f"{row['start_offset']:>12,}  {row['next_offset']:>12,}  {row['bytes']:>14,}  "
                f"{row['segments']:>8,}  {row['sinks']:>5,}  {lag:>12,}  {quarantined:>11,}"
            )
        table.put(row, f"{row['health']:9}  {numbers}  {row.get('corruption', '')}")


def _status_to_json(partition: StoredPartition, log: DurableLog, report: RecoveryReport) -> dict[str, Any]:
    """Describe a log that opens. Raises LogCorrupted, OSError."""
    disk = partition.disk
    fields: dict[str, Any] = {"log_id": log.log_id.hex(), "epoch": log.epoch, "closed": report.clean}
    fields |= {"start_offset": log.start_offset, "next_offset": log.high_watermark}
    fields |= {"segments": report.segments, "bytes": report.bytes, "bytes_free": partition.root.free_bytes()}
    # free_bytes_min is that of the default settings: the server's are not known here
    fields["bytes_until_full"] = max(fields["bytes_free"] - log.settings.free_bytes_min, 0)
    sinks = read_sinks(partition, log)
    fields |= {"sinks": len(sinks), "snapshot": None}
    fields["lags"] = lags_of(sinks, "name")
    faults = [sink["corruption"] for sink in sinks if "corruption" in sink]
    faults += corruption_of_cursors(disk)
    fields |= {"health": "corrupted", "corruption": "; ".join(faults)} if faults else {}
    try:
        fields["snapshot"] = snapshot_to_json(log)
    except LogCorrupted as corruption:
        fields |= {"health": "corrupted", "corruption": str(corruption)}
    quarantines = read_quarantines(disk, log.log_id, log.epoch_end).items()
    fields["quarantined"] = {name: len(quarantine) for name, quarantine in quarantines if len(quarantine)}
    fields["jobs"] = JobFiles(disk).count_by_state()
    jump = read_times(partition.root, partition.place.log_path, report.notes).jump
    fields["clock_jump"] = jump and {name[:-3]: format_time(us) for name, us in jump._asdict().items()}
    return fields


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its path, e.g. `log.next_offset`; for a list, its length."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, len(value) if isinstance(value, list) else value


def format_value(value: object) -> str:
    """Return a JSON value as text for people."""
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_value(count)}" for name, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
