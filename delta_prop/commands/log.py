"""`log show`, `log verify`, `log export`: read a log on disk, also while a process writes it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from delta_prop.delivery.cursors import cursors_corruption
from delta_prop.directory.log_positions import EARLIEST, LATEST, parse_position, reached_offset
from delta_prop.directory.readonly_log import open_disk, open_readonly_log, snapshot_to_json
from delta_prop.platform import system
from delta_prop.platform.dates import format_time
from delta_prop_broker.corruption import REPAIR, LogCorrupted
from delta_prop_broker.readonly.inspect import (
    inspect,
    inspect_checkpoints,
    inspect_snapshots,
    start_offset,
)
from delta_prop_broker.retention.snapshot import SnapshotFacts, snapshot_path
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.control_rows import ControlType, control_type, refused_code
from delta_prop_wire.jsonlines import to_line
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.directory.log_positions import LogPosition
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.segments.frames import FrameLocation
    from delta_prop_wire.batch import Batch

OK, FAILED = 0, 1
_REPORTED_MAX = 20
_COLUMNS = ("offset", "time", "lamport", "dot", "op", "vector")


@dataclass(frozen=True, slots=True)
class LogRange:
    """Range of a log: from `start` on, up to `count` rows (None: all)."""

    data: str
    start: str | None = None
    count: int | None = None


# --- show


def show(log_range: LogRange, *, as_json: bool) -> int:
    """Print one line per row, no-ops too. Raises UsageError, LogCorrupted, OSError."""
    position = (
        EARLIEST if log_range.start is None else parse_position("--start", log_range.start, system.wall_us())
    )
    with open_readonly_log(log_range.data) as (disk, log, _):
        start = reached_offset(position, log)
        if not as_json:
            snapshot = snapshot_to_json(log)
            if snapshot is not None:
                system.put(
                    f"snapshot at offset {snapshot['offset']}: {snapshot['rows']:,} rows, "
                    f"{snapshot['bytes']:,} bytes"
                )
            system.put(_format_row(dict(zip(_COLUMNS, _COLUMNS, strict=True))))
        _note_removed(disk, start)
        rows = islice(_read_rows(log, start), log_range.count)
        system.put_all(json.dumps(row, ensure_ascii=False) if as_json else _format_row(row) for row in rows)
    return OK


def _read_rows(log: DurableLog, start: int) -> Iterator[dict[str, Any]]:
    for location in log.frames(start):
        yield from (row for row in _frame_rows(location) if row["offset"] >= start)


def _frame_rows(location: FrameLocation) -> Iterator[dict[str, Any]]:
    logged, batch = location.logged, location.logged.batch
    for row in range(batch.count):
        fields: dict[str, Any] = {
            "offset": logged.offset + row,
            "time": format_time(location.stamp.append_time),
            "lamport": logged.lamport + row,
            "dot": str(batch.dot(row)),
        }
        if batch.is_control:
            fields |= _control_fields(batch, row)
        else:
            fields |= {"op": kind_name(batch.operation(row).kind)}
            fields |= {"namespace": batch.namespaces[row], "vector_id": batch.keys[row]}
        yield fields


def _control_fields(batch: Batch, row: int) -> dict[str, Any]:
    kind = control_type(batch)
    if kind is not ControlType.REFUSED:
        return {"op": "control", "type": "unknown" if kind is None else kind.name.lower()}
    code = refused_code(batch, row)
    return {"op": "noop", "error": ErrorCode(code).name if code in set(ErrorCode) else str(code)}


def _format_row(row: dict[str, Any]) -> str:
    if row["op"] in ("noop", "control"):
        vector = row.get("error") or row["type"]
    else:
        vector = row.get("vector") or f"{row['namespace']} {row['vector_id']}"
    numbers = f"{row['offset']:>10}  {row['time']:24}  {row['lamport']:>10}"
    return f"{numbers}  {row['dot']:>28}  {row['op']:10}  {vector}"


# --- verify


def verify(data: str, *, as_json: bool) -> int:
    """Read and check everything; return exit status 1 and report every corruption if there is one.

    A torn tail that was never synced is not a corruption: a writer may be writing it, or was killed. Raises
    FormatUnknown, OSError.
    """
    disk = open_disk(data, allow_corrupt=True)
    report = _scan_log(disk)
    if report.corruptions:  # a writer may have removed a segment during the scan: real corruption stays
        report = _scan_log(disk)
    fields: dict[str, Any] = {
        "intact": not report.corruptions,
        "frames": report.frames,
        "deltas": report.rows,
    }
    fields |= {"bytes": report.bytes, "start_offset": report.start_offset, "next_offset": report.next_offset}
    fields |= {"torn_tail": report.torn_tail is not None, "corruptions": len(report.corruptions)}
    fields |= {"snapshots": len(report.snapshots), "snapshot_rows": sum(report.snapshots.values())}
    fields |= {"snapshot_offset": max(report.snapshots, default=None), "checkpoints": report.checkpoints}
    if as_json:
        system.put(
            json.dumps(
                fields
                | {
                    "first_corruption": _corruption_to_json(report.corruptions[0])
                    if report.corruptions
                    else None
                }
            )
        )
        return FAILED if report.corruptions else OK
    state = f"{len(report.corruptions)} corruptions" if report.corruptions else "intact"
    system.put(
        f"{report.rows:,} deltas in {report.frames:,} frames of {report.bytes:,} bytes, "
        f"offsets {report.start_offset} to {report.next_offset}: {state}"
    )
    for offset, rows in report.snapshots.items():
        system.put(f"snapshot of {rows:,} rows at offset {offset}: intact")
    if 0 < report.start_offset <= max(report.snapshots, default=0):
        system.put(f"offsets before {report.start_offset}: only the snapshot has them")
    if report.checkpoints:
        system.put(f"checkpoints: {report.checkpoints}, intact")
    if report.torn_tail is not None:
        system.put(
            f"torn tail after the intact frames: {report.torn_tail.path}, byte {report.torn_tail.position}: "
            f"{report.torn_tail.reason}"
        )
    for corruption in report.corruptions[:_REPORTED_MAX]:
        system.note(corruption.description)
    if len(report.corruptions) > _REPORTED_MAX:
        system.note(f"and {len(report.corruptions) - _REPORTED_MAX} more")
    if report.corruptions:
        system.note(f"nothing was changed; {REPAIR}")
    return FAILED if report.corruptions else OK


@dataclass(slots=True)
class _VerifyReport:
    """Counts and faults of a full pass over a log."""

    frames: int = 0
    rows: int = 0
    bytes: int = 0
    start_offset: int = 0
    next_offset: int = 0
    torn_tail: LogCorrupted | None = None
    corruptions: list[LogCorrupted] = field(default_factory=list)
    snapshots: dict[int, int] = field(default_factory=dict)  # offset to number of rows
    checkpoints: int = 0


def _scan_log(disk: Disk) -> _VerifyReport:
    # Snapshots and checkpoints are read first: a writer may append more, and the log must reach their ends.
    saved = [*inspect_snapshots(disk), *inspect_checkpoints(disk)]
    start = start_offset(disk)
    result = _VerifyReport(start_offset=start, next_offset=start)
    for entry in inspect(disk):
        if not isinstance(entry, LogCorrupted):
            result.start_offset = result.start_offset if result.frames else entry.logged.offset
            result.frames, result.rows = result.frames + 1, result.rows + entry.logged.count
            result.bytes, result.next_offset = result.bytes + entry.size, entry.logged.next_offset
        elif _is_torn_tail(entry):
            result.torn_tail = entry
        else:
            result.corruptions.append(entry)
    end = max([result.next_offset, *(corruption.end or 0 for corruption in result.corruptions)])
    for file in (*saved, *filter(None, [cursors_corruption(disk)])):
        if isinstance(file, LogCorrupted):
            result.corruptions.append(file)
        elif file.offset > end:
            path = snapshot_path(DIRECTORY, file.offset) if isinstance(file, SnapshotFacts) else file.path
            result.corruptions.append(LogCorrupted(path, f"the log ends at offset {end}, before this file"))
        elif isinstance(file, SnapshotFacts):
            result.snapshots[file.offset] = file.rows
        else:
            result.checkpoints += 1
    return result


def _is_torn_tail(corruption: LogCorrupted) -> bool:
    """True if the corruption is after all synced bytes, so that no acknowledged delta is lost."""
    return corruption.position is not None and corruption.end is None


def _corruption_to_json(corruption: LogCorrupted) -> dict[str, Any]:
    return {
        "file": corruption.path,
        "position": corruption.position,
        "start_offset": corruption.offset,
        "next_offset": corruption.end,
        "reason": corruption.reason,
    }


# --- export


def export(log_range: LogRange, *, output: str | None, as_frames: bool, skip_corrupt: bool) -> int:
    """Write the log out: deltas as JSON lines, or `as_frames`, the bytes of the log.

    A corruption raises LogCorrupted; with `skip_corrupt` it is reported, and the export continues after it.
    Raises UsageError, OSError.
    """
    start = (
        EARLIEST if log_range.start is None else parse_position("--start", log_range.start, system.wall_us())
    )
    disk = open_disk(log_range.data, allow_corrupt=skip_corrupt)
    with ExitStack() as exits:
        if skip_corrupt:
            locations = _readable_frames(disk)
        else:
            _, log, _ = exits.enter_context(open_readonly_log(log_range.data))
            locations = log.frames(log.start_offset)
        if start != LATEST and start.time_us is None:
            _note_removed(disk, start.offset or 0)
        out = exits.enter_context(system.open_output(output))
        for location, rows in _select_rows(locations, start, log_range.count):
            if as_frames:
                out.write(location.logged.head, location.logged.batch.body)
            else:
                for row in () if location.logged.batch.is_control else rows:
                    delta = location.logged.batch.delta(row, location.logged.source)
                    out.write(to_line(delta, location.logged.offset + row).encode() + b"\n")
        out.flush()
    return OK


def _readable_frames(disk: Disk) -> Iterator[FrameLocation]:
    """Yield every frame that can be read; report the corrupted ones."""
    for entry in inspect(disk):
        if isinstance(entry, LogCorrupted):
            span = "" if entry.offset is None else f" (offset {entry.offset} to {entry.end or 'the end'})"
            system.note(f"skipped: {entry.path}{span}: {entry.reason}")
        else:
            yield entry


def _note_removed(disk: Disk, start: int) -> None:
    """Report the offsets from `start` on that the log no longer holds."""
    log_start = start_offset(disk)
    if start < log_start:
        system.note(f"skipped: offsets {start} to {log_start}, which the log has removed")


def _select_rows(
    locations: Iterator[FrameLocation], start: LogPosition, remaining: int | None
) -> Iterator[tuple[FrameLocation, range]]:
    """Yield the frames that hold rows from `start` on, each with the range of those rows.

    Stops after `remaining` rows.
    """
    for location in locations:
        logged = location.logged
        if start == LATEST or (start.time_us is not None and location.stamp.append_time < start.time_us):
            continue
        start = start if start.time_us is None else EARLIEST
        first = max((start.offset or 0) - logged.offset, 0)
        rows = range(first, logged.count if remaining is None else min(logged.count, first + remaining))
        if rows:
            yield location, rows
        remaining = None if remaining is None else remaining - len(rows)
        if remaining == 0:
            return
