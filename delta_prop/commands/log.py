"""`log show`, `log verify`, `log export`: read a log on disk, also while a process writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from delta_prop.commands.connect_options import read_position
from delta_prop.commands.tables import name_of
from delta_prop.delivery.cursors import cursors_corruption
from delta_prop.directory.log_positions import (
    EARLIEST,
    LATEST,
    LogPosition,
    check_start_of_all,
    reached_offset,
)
from delta_prop.directory.readonly_log import snapshot_to_json
from delta_prop.directory.stored_partitions import (
    StoredPartition,
    find_partition,
    have_column,
    list_partitions,
)
from delta_prop.platform import system
from delta_prop.platform.dates import format_time
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_broker.corruption import REPAIR, LogCorrupted
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.readonly.inspect import inspect, inspect_checkpoints, inspect_snapshots, start_offset
from delta_prop_broker.retention.snapshot import SnapshotFacts, snapshot_path
from delta_prop_broker.segments.frames import FrameLocation
from delta_prop_wire.batch import Batch
from delta_prop_wire.control_rows import ControlType, control_type, refused_code
from delta_prop_wire.errors import UsageError
from delta_prop_wire.jsonlines import to_line
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import kind_name

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1
_REPORTED_MAX = 20
_COLUMNS = ("offset", "time", "lamport", "dot", "op", "vector")


# --- show


def show(options: Namespace) -> int:
    """Print one line per row, no-ops too. Raises UsageError, LogCorrupted, OSError."""
    position = read_position("--start", options.start, EARLIEST)
    partition = find_partition(options.data, name_of(options))
    with partition.open_log() as (_, log, _):
        start = reached_offset(position, log)
        if not options.json:
            snapshot = snapshot_to_json(log)
            if snapshot is not None:
                system.put(
                    f"snapshot at offset {snapshot['offset']}: {snapshot['rows']:,} rows, "
                    f"{snapshot['bytes']:,} bytes"
                )
            system.put(_format_row(dict(zip(_COLUMNS, _COLUMNS, strict=True))))
        _note_removed(partition, start)
        rows = islice(_read_rows(log, start), options.count)
        to_line_of = partial(json.dumps, ensure_ascii=False) if options.json else _format_row
        system.put_all(map(to_line_of, rows))
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
            yield fields | _control_fields(batch, row)
        else:
            vector = {"namespace": batch.namespaces[row], "vector_id": batch.keys[row]}
            yield fields | {"op": kind_name(batch.operation(row).kind)} | vector


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


def verify(options: Namespace) -> int:
    """Read and check everything; return exit status 1 and report every corruption if there is one.

    A torn tail that was never synced is not a corruption: a writer may be writing it, or was killed. Raises
    FormatUnknown, OSError.
    """
    try:
        partitions, fault = _list_to_verify(options), None
    except LogCorrupted as corruption:  # of the catalogue
        partitions, fault = [find_partition(options.data, allow_corrupt=True)], corruption
    has_corruptions = False
    for partition in partitions:
        report = _scan_log(partition)
        if report.corruptions:  # a writer may have removed a segment during the scan: real corruption stays
            report = _scan_log(partition)
        if fault is not None:
            report.corruptions.append(fault)
        has_corruptions |= bool(report.corruptions)
        if options.json:
            system.put(json.dumps(_report_to_json(report) | partition.fields))
        else:
            _put_report(report, f"{partition.label}: " if have_column(partitions) else "")
    return FAILED if has_corruptions else OK


def _list_to_verify(options: Namespace) -> list[StoredPartition]:
    return list_partitions(options.data, options.stream, options.partition, allow_corrupt=True)


def _put_report(report: _VerifyReport, name: str) -> None:
    state = f"{len(report.corruptions)} corruptions" if report.corruptions else "intact"
    system.put(
        f"{name}{report.rows:,} deltas in {report.frames:,} frames of {report.bytes:,} bytes, "
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


def _report_to_json(report: _VerifyReport) -> dict[str, Any]:
    fields: dict[str, Any] = {"intact": not report.corruptions, "frames": report.frames}
    fields |= {"deltas": report.rows, "bytes": report.bytes}
    fields |= {"start_offset": report.start_offset, "next_offset": report.next_offset}
    fields |= {"torn_tail": report.torn_tail is not None, "corruptions": len(report.corruptions)}
    fields |= {"snapshots": len(report.snapshots), "snapshot_rows": sum(report.snapshots.values())}
    fields |= {"snapshot_offset": max(report.snapshots, default=None), "checkpoints": report.checkpoints}
    if not report.corruptions:
        return fields | {"first_corruption": None}
    first = report.corruptions[0]
    corruption = {"file": first.path, "position": first.position, "start_offset": first.offset}
    return fields | {"first_corruption": corruption | {"next_offset": first.end, "reason": first.reason}}


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


def _scan_log(partition: StoredPartition) -> _VerifyReport:
    root, directory = partition.root, partition.place.log_path
    # Snapshots and checkpoints are read first: a writer may append more, and the log must reach their ends.
    saved = [*inspect_snapshots(root, directory), *inspect_checkpoints(root, directory)]
    start = start_offset(root, directory)
    result = _VerifyReport(start_offset=start, next_offset=start)
    for entry in inspect(root, directory):
        if not isinstance(entry, LogCorrupted):
            result.start_offset = result.start_offset if result.frames else entry.logged.offset
            result.frames, result.rows = result.frames + 1, result.rows + entry.logged.count
            result.bytes, result.next_offset = result.bytes + entry.size, entry.logged.next_offset
        elif entry.position is not None and entry.end is None:
            result.torn_tail = entry  # after all synced bytes, so no acknowledged delta is lost
        else:
            result.corruptions.append(entry)
    end = max([result.next_offset, *(corruption.end or 0 for corruption in result.corruptions)])
    for file in (*saved, *filter(None, [cursors_corruption(partition.disk)])):
        if isinstance(file, LogCorrupted):
            result.corruptions.append(file)
        elif file.offset > end:
            path = snapshot_path(directory, file.offset) if isinstance(file, SnapshotFacts) else file.path
            result.corruptions.append(LogCorrupted(path, f"the log ends at offset {end}, before this file"))
        elif isinstance(file, SnapshotFacts):
            result.snapshots[file.offset] = file.rows
        else:
            result.checkpoints += 1
    return result


# --- export


def export(options: Namespace) -> int:
    """Write the log out: deltas as JSON lines, or the frames of the log; or copy it.

    A corruption raises LogCorrupted; with `skip_corrupt` it is reported, and the export continues after it.
    Raises UsageError, OSError.
    """
    if options.to is not None:
        from delta_prop.commands.backup import copy

        other_options = ("stream", "partition", "start", "count", "output")
        if (
            options.format != "jsonl"
            or options.skip_corrupt
            or any(getattr(options, name) is not None for name in other_options)
        ):
            raise UsageError("--to copies the logs of all streams as they are: leave the other options out")
        return copy(options.data, options.to)
    start = read_position("--start", options.start, EARLIEST)
    stream = DEFAULT_STREAM if options.stream is None else options.stream
    partitions = list_partitions(options.data, stream, options.partition, allow_corrupt=options.skip_corrupt)
    count = len(partitions)
    if count > 1:
        check_start_of_all(None if start in (EARLIEST, LATEST) else start, stream, count)
        if options.format == "frames":
            raise UsageError(
                f"--format frames: stream {stream!r} has {count} partitions, and frames do not name "
                "theirs: name one with --partition"
            )
    remaining = options.count
    with system.open_output(options.output) as out:
        for partition in partitions:
            remaining = _export_partition(partition, start, remaining, out, options, is_named=count > 1)
            if remaining == 0:
                break
        out.flush()
    return OK


def _export_partition(
    partition: StoredPartition,
    start: LogPosition,
    remaining: int | None,
    out: system.Output,
    options: Namespace,
    *,
    is_named: bool,
) -> int | None:
    """Write rows of a partition; return how many more may be written. `is_named`: lines name it."""
    with ExitStack() as exits:
        if options.skip_corrupt:
            locations = _readable_frames(partition)
        else:
            _, log, _ = exits.enter_context(partition.open_log())
            locations = log.frames(log.start_offset)
        if start != LATEST and start.time_us is None:
            _note_removed(partition, start.offset or 0)
        number = partition.partition if is_named else None
        for location, rows in _select_rows(locations, start, remaining):
            logged = location.logged
            if options.format == "frames":
                out.write(logged.head, logged.batch.body)
            else:
                for row in () if logged.batch.is_control else rows:
                    delta = logged.batch.delta(row, logged.source)
                    out.write(to_line(delta, logged.offset + row, number).encode() + b"\n")
            remaining = None if remaining is None else remaining - len(rows)
    return remaining


def _readable_frames(partition: StoredPartition) -> Iterator[FrameLocation]:
    """Yield every frame that can be read; report the corrupted ones."""
    for entry in inspect(partition.root, partition.place.log_path):
        if isinstance(entry, LogCorrupted):
            span = "" if entry.offset is None else f" (offset {entry.offset} to {entry.end or 'the end'})"
            system.note(f"skipped: {entry.path}{span}: {entry.reason}")
        else:
            yield entry


def _note_removed(partition: StoredPartition, start: int) -> None:
    """Report the offsets from `start` on that the log no longer holds."""
    log_start = start_offset(partition.root, partition.place.log_path)
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


VERBS = {"show": show, "verify": verify, "export": export}
