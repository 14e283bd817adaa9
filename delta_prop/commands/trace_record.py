"""`trace record`: writes times and sizes of deltas, from a server's or a directory's log, to a file.

Once a second it writes and syncs the deltas that have come, so that they survive kill -9 and a power cut.
Readers ignore a torn block at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from math import inf
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.client import Subscriber
from delta_prop.commands.connect_options import ConnectOptions, read_position, source_of
from delta_prop.commands.tables import name_of
from delta_prop.commands.wait_reporter import report_subscriber_waits
from delta_prop.directory.log_positions import (
    EARLIEST,
    LATEST,
    LogPosition,
    parse_span_s,
    reached_offset,
    subscribe_start_of,
)
from delta_prop.directory.readonly_log import PartitionName
from delta_prop.directory.recorded_traffic import SALT_BYTES, TrafficWriter
from delta_prop.directory.stored_partitions import find_partition
from delta_prop.platform import system
from delta_prop.platform.dates import format_time
from delta_prop_broker.readonly.follow import Follower
from delta_prop_wire.batch import Batch
from delta_prop_wire.errors import UsageError
from delta_prop_wire.stamp import Stamp

if TYPE_CHECKING:
    from argparse import Namespace

    from delta_prop.client.delivered_batch import DeliveredBatch

OK = 0
SYNC_INTERVAL_S = 1.0
"""Maximum time for which a delta is only in memory, or written bytes are not synced."""


async def record(options: Namespace) -> int:
    """Write the recording.

    Raises UsageError, Refused (CURSOR_TOO_OLD, UNAUTHORIZED, UNKNOWN_STREAM, WRONG_PARTITION), LogCorrupted,
    OSError.
    """
    source = source_of(options)
    start = read_position("--start", options.start, None)
    until = read_position("--until", options.until, None, allow_future=True)
    span_s = inf if options.span is None else parse_span_s("--for", options.span)
    if until is not None and _is_empty_range(start, until):
        raise UsageError(
            f"--until {options.until}: nothing lies between --start and it: give a later position"
        )
    trace_range = _TraceRange(start, until, span_s)
    if isinstance(source, str):
        await _record_directory(source, name_of(options), options.to, trace_range)
    else:
        await _record_server(source, name_of(options), options.to, trace_range)
    return OK


def _is_empty_range(start: LogPosition | None, until: LogPosition) -> bool:
    """True if no delta can be between the two positions, whatever the log holds."""
    if start is None or start == EARLIEST:
        return False
    if until == EARLIEST:
        return True
    if start.offset is not None and until.offset is not None:
        return until.offset <= start.offset
    if start.time_us is not None and until.time_us is not None:
        return until.time_us <= start.time_us
    return start == until == LATEST


class _TraceRange:
    """Range of a log to record, in full batches. A span starts with the first recorded batch."""

    def __init__(self, start: LogPosition | None, until: LogPosition | None, span_s: float) -> None:
        self.start = start
        self.span_s = span_s
        self._until = until
        self._end: int | None = None
        self._first_us = None if start is None else start.time_us

    def set_log_end(self, log_end: int | None, *, followed: bool) -> None:
        """Set the present end of the log; `followed`: without --until, the recording continues after it."""
        if self._until == LATEST or (self._until is None and not followed):
            self._end = log_end
        elif self._until is not None and self._until.time_us is None:
            self._end = 0 if self._until.earliest else self._until.offset

    def is_offset_past_end(self, offset: int) -> bool:
        """True if the range ends at or before the offset."""
        return self._end is not None and offset >= self._end

    def is_batch_past_end(self, offset: int, time_us: int) -> bool:
        """True if a batch at this offset and time is after the end."""
        if self._first_us is None:
            self._first_us = time_us
        if time_us - self._first_us >= 1e6 * self.span_s or self.is_offset_past_end(offset):
            return True
        return self._until is not None and self._until.time_us is not None and time_us >= self._until.time_us


async def _record_directory(data: str, name: PartitionName, to: str, trace_range: _TraceRange) -> None:
    partition = find_partition(data, name)
    with partition.open_log() as (_, log, _):
        start, end = reached_offset(trace_range.start or EARLIEST, log), log.high_watermark
    trace_range.set_log_end(end, followed=False)
    follower = Follower(partition.root, start, partition.place.log_path, synced=end)
    with closing(follower), _open_recording(to) as recording:
        for location in follower.read():
            logged = location.logged
            if trace_range.is_batch_past_end(logged.offset, location.stamp.append_time):
                return
            recording.add(logged.batch, location.stamp, max(start - logged.offset, 0))
            await anyio.lowlevel.checkpoint()


async def _record_server(
    connect_options: ConnectOptions, place: PartitionName, to: str, trace_range: _TraceRange
) -> None:
    subscriber = Subscriber(
        connect_options.addresses,
        "*",
        start="latest" if trace_range.start is None else subscribe_start_of(trace_range.start),
        name="delta-prop trace record",
        stream=place.stream,
        partition=place.partition,
        token=connect_options.token,
        tls=connect_options.tls,
    )
    async with report_subscriber_waits(subscriber), subscriber:
        trace_range.set_log_end(subscriber.log_end, followed=True)
        with _open_recording(to) as recording, anyio.move_on_after(trace_range.span_s):
            while True:
                batch: DeliveredBatch | None = None
                is_complete = trace_range.is_offset_past_end(subscriber.received)
                with anyio.move_on_after(0 if is_complete else recording.due_s):
                    batch = await subscriber.next_batch()
                if batch is None and is_complete:
                    return
                if batch is None:
                    recording.sync()
                    continue
                assert batch.batch is not None
                assert batch.stamp is not None
                if trace_range.is_batch_past_end(batch.offset, batch.stamp.append_time):
                    return
                recording.add(batch.batch, batch.stamp, batch.first)
                await anyio.lowlevel.checkpoint()


@contextmanager
def _open_recording(to: str) -> Iterator[_RecordingWriter]:
    """Open a recording in a new file; complete it when the block ends or is interrupted."""
    with system.open_output(to) as out:
        recording = _RecordingWriter(out)
        try:
            yield recording
        except Exception:
            recording.sync()
            raise
        except BaseException:
            recording.end()
            raise
        recording.end()


class _RecordingWriter:
    """A recording that is being written, and its counts."""

    def __init__(self, out: system.Output) -> None:
        self._out = out
        self._writer = TrafficWriter(system.draw(SALT_BYTES))
        self._progress = system.Progress()
        self._batches = self._deltas = self._bytes = 0
        self._first_us: int | None = None
        self._last_us = 0
        self._unsynced_since: float | None = None
        self._write(self._writer.begin(system.wall_us()))
        self.sync()

    @property
    def due_s(self) -> float:
        """Seconds until the next sync; infinite while everything is synced."""
        return inf if self._unsynced_since is None else self._unsynced_since + SYNC_INTERVAL_S - system.now()

    def add(self, batch: Batch, stamp: Stamp, first: int) -> None:
        """Add a batch's rows from `first` on. Raises OSError."""
        if batch.is_control:
            return
        self._first_us = stamp.append_time if self._first_us is None else self._first_us
        self._last_us = stamp.append_time
        self._batches += 1
        self._deltas += batch.count - first
        if self._unsynced_since is None:
            self._unsynced_since = system.now()
        self._write(self._writer.add(batch, stamp.append_time, stamp.source, first))
        if self.due_s <= 0:
            self.sync()
        self._progress.report(f"{self._deltas:,} deltas in {self._bytes:,} bytes")

    def sync(self) -> None:
        """Write and sync the deltas so far. Raises OSError."""
        self._write(self._writer.flush())
        self._out.sync()
        self._unsynced_since = None

    def end(self) -> None:
        """Mark the recording complete. Raises OSError."""
        self._write(self._writer.end(system.wall_us()))
        self._out.sync()
        self._progress.end()
        system.confirm(json.dumps(self._to_json()))

    def _write(self, raw: bytes) -> None:
        if raw:
            self._out.write(raw)
            self._bytes += len(raw)

    def _to_json(self) -> dict[str, object]:
        fields: dict[str, object] = {"batches": self._batches, "deltas": self._deltas, "bytes": self._bytes}
        if self._first_us is not None:
            fields |= {"first": format_time(self._first_us), "last": format_time(self._last_us)}
        return fields
