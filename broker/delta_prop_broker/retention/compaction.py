"""Compaction: makes a snapshot of rows that the log is about to remove.

Reads the sealed segments after the previous snapshot, and writes the next snapshot, in steps of a few
milliseconds with bounded memory. It does not change the log, which removes segments once the new snapshot is
on stable storage.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.retention.merging import Merge
from delta_prop_broker.retention.raw_rows import FrameBuilder
from delta_prop_broker.retention.snapshot import (
    OriginWatermark,
    SnapshotFacts,
    SnapshotWriter,
    open_snapshot,
    snapshot_offsets,
    snapshot_path,
)
from delta_prop_broker.retention.sorted_run import ChangeFolder, RunBuilder, SortedRun, SpillFile
from delta_prop_broker.segments.frames import FrameScanner
from delta_prop_broker.segments.paths import TEMPORARY
from delta_prop_wire.control_rows import uses_dots
from delta_prop_wire.delta import Dot, KnownIds
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.retention.snapshot import Snapshot
    from delta_prop_broker.segments.frames import FrameLocation

TOTAL_CLOCK_ENTRIES_MAX = 262_144
"""Maximum number of clock entries of all origins in a snapshot."""
_POLL_BYTES = 4 * 1024 * 1024  # written between two polls of the free disk space
STEP_BYTES = 256 * 1024
STEP_ROWS = 2048
"""A step reads the log until it has this many rows or bytes."""


class SegmentRange(NamedTuple):
    """A sealed segment: its file, its first offset and its end (exclusive)."""

    path: str
    base: int
    end: int


class Watermarks:
    """Each origin's watermark, epoch and clock, updated batch by batch.

    Clocks are bounded: an origin keeps the entries that changed last, and the origins that wrote last keep
    their clocks. If entries are lost, too many deltas count as concurrent, but never too few.
    """

    def __init__(self, before: Mapping[int, OriginWatermark]) -> None:
        self._last: dict[int, tuple[int, int]] = {}  # origin -> epoch, last counter
        self._clocks: OrderedDict[int, dict[int, int]] = OrderedDict()
        self._entries = 0
        for origin, mark in before.items():
            self.note(origin, mark.epoch, mark.counter, mark.clock)

    def note(self, origin: int, epoch: int, counter: int, entries: Sequence[Dot]) -> None:
        """Add a batch of this origin: its last counter, and its clock entries."""
        known_epoch, _ = self._last.get(origin, (0, 0))
        self._last[origin] = (max(known_epoch, epoch), counter)
        if not entries:
            return
        clock = self._clocks.setdefault(origin, {})
        self._clocks.move_to_end(origin)
        for seen_origin, counter_seen in entries:
            known_counter = clock.pop(seen_origin, 0)
            clock[seen_origin] = max(known_counter, counter_seen)
            self._entries += not known_counter
        while len(clock) > CLOCK_ENTRIES_MAX:
            del clock[next(iter(clock))]
            self._entries -= 1
        while self._entries > TOTAL_CLOCK_ENTRIES_MAX:
            self._entries -= len(self._clocks.popitem(last=False)[1])

    def all(self) -> dict[int, OriginWatermark]:
        """Return the watermark of each origin."""
        return {
            origin: OriginWatermark(
                epoch, counter, tuple(Dot(*entry) for entry in sorted(self._clocks.get(origin, {}).items()))
            )
            for origin, (epoch, counter) in self._last.items()
        }


class Compaction:
    """One compaction, from the snapshot at `previous` (None: the first segment) to the end of `segments`.

    Call `step` until it returns True, or call `abort`. Each call may wait for the disk; only one may run at a
    time. `run_bytes_max`: memory for sorting, approximately; further rows are spilled to files, which the
    compaction removes at its end. `rows_read`, `bytes_read` and `run_count` count the work done so far; the
    `snapshot_…` attributes give the size of the new snapshot. `step` raises OSError when less than
    `free_bytes_min` are free on the disk.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        log_id: bytes,
        segments: Sequence[SegmentRange],
        previous: int | None,
        run_bytes_max: int,
        free_bytes_min: int = 0,
    ) -> None:
        self.offset = segments[-1].end
        self.rows_read = self.bytes_read = self.run_count = 0
        self.snapshot_bytes = self.snapshot_rows = 0
        self._disk = disk
        self._directory = directory
        self._log_id = log_id
        self._segments = segments
        self._previous = previous
        self._run_bytes_max = run_bytes_max
        self._free_bytes_min = free_bytes_min
        self._next_poll_bytes = 0
        self._spill_files: list[SpillFile] = []
        self._writer: SnapshotWriter | None = None
        self._base: Snapshot | None = None
        self._steps = self._work()

    def step(self) -> bool:
        """Continue for a few milliseconds; return True once the new snapshot is on stable storage.

        Raises LogCorrupted, OSError, Refused (a state is too large for a frame); this ends the compaction.
        """
        try:
            next(self._steps)
        except StopIteration:
            return True
        except BaseException:
            self.abort()
            raise
        return False

    def abort(self) -> None:
        """Stop, and remove the files written so far, as far as the disk removes them."""
        self._steps.close()
        with suppress(OSError):
            self._drop_runs()
        if self._writer is not None:
            with suppress(OSError):
                self._writer.discard()
            self._writer = None
        if self._base is not None:
            self._base.close()
            self._base = None

    def _work(self) -> Generator[None, None, None]:
        base = None
        if self._previous is not None:
            base = self._base = open_snapshot(self._disk, self._directory, self._previous)
        folder = ChangeFolder()
        reader = _SegmentReader(base, self._segments)
        runs: list[SortedRun] = []
        in_order = True
        while True:
            try:
                yield from self._gather(reader, runs, folder, in_order=in_order)
                break
            # A forwarded delta may sort before a delta that was read already, or be a duplicate of one.
            except _OutOfOrderFrame:
                self._drop_runs()
                reader, runs = _SegmentReader(base, self._segments), []
                folder, in_order = ChangeFolder(), False
        facts = SnapshotFacts(
            self._log_id,
            self.offset,
            reader.begin,
            reader.time_us,
            reader.lamport,
            reader.chain_crc or 0,
        )
        writer = self._writer = SnapshotWriter(self._disk, self._directory, facts)
        out = FrameBuilder(writer.add, states=True)
        for _ in Merge(() if base is None else base.frames(), runs, folder, out).run():
            self._check_disk_space(writer.bytes)
            yield
        out_of_order = folder.out_of_order + (0 if base is None else base.facts.out_of_order)
        unfolded = folder.unfolded + (0 if base is None else base.facts.unfolded)
        snapshot = writer.finish(
            reader.watermarks.all(), alive=out.alive, out_of_order=out_of_order, unfolded=unfolded
        )
        self._writer = None
        self.snapshot_bytes, self.snapshot_rows = snapshot.bytes, snapshot.rows
        snapshot.close()
        if base is not None:
            base.close()
            self._base = None
        with suppress(OSError):  # the snapshot is complete: the next start removes the other files
            self._drop_runs()
            remove_older(self._disk, self._directory, self.offset)

    def _gather(
        self, reader: _SegmentReader, runs: list[SortedRun], folder: ChangeFolder, *, in_order: bool
    ) -> Iterator[None]:
        """Read all segments, in steps, and add their rows to `runs`, sorted."""
        builder = RunBuilder(in_order)
        row_count = size = 0
        for segment in self._segments:
            for location in reader.frames(self._disk, segment):
                batch = location.logged.batch
                if in_order and not reader.is_ascending:
                    raise _OutOfOrderFrame
                if not batch.is_control:
                    builder.add(location.logged)
                row_count, size = row_count + batch.count, size + location.size
                if builder.bytes >= self._run_bytes_max:
                    yield from self._close_run(builder, runs, folder, spill=True)
                if row_count >= STEP_ROWS or size >= STEP_BYTES:
                    self.rows_read, self.bytes_read = self.rows_read + row_count, self.bytes_read + size
                    row_count = size = 0
                    yield
        self.rows_read, self.bytes_read = self.rows_read + row_count, self.bytes_read + size
        if builder.bytes:
            yield from self._close_run(builder, runs, folder, spill=False)

    def _close_run(
        self, builder: RunBuilder, runs: list[SortedRun], folder: ChangeFolder, *, spill: bool
    ) -> Iterator[None]:
        """Write the builder's rows as a run, add it to `runs`, and empty the builder."""
        self.run_count += 1
        stem = f"{snapshot_path(self._directory, self.offset)}-{len(runs)}"
        files = []
        for kind in ("rows", "changes"):
            spill_file = SpillFile(self._disk, f"{stem}-{kind}{TEMPORARY}") if spill else SpillFile()
            self._spill_files.append(spill_file)
            files.append(spill_file)
        run = SortedRun(*files)
        yield from builder.close(run, folder)
        runs.append(run)

    def _check_disk_space(self, written: int) -> None:
        """Raise OSError before the disk is full: the log's own commits need space."""
        if written < self._next_poll_bytes:
            return
        self._next_poll_bytes = written + _POLL_BYTES
        free = self._disk.free_bytes()
        if free < self._free_bytes_min:
            raise OSError(
                errno.ENOSPC, f"{free} bytes are left, of which {self._free_bytes_min} stay free for the log"
            )

    def _drop_runs(self) -> None:
        while self._spill_files:
            self._spill_files.pop().drop()


class _OutOfOrderFrame(Exception):
    """A frame's Lamport numbers do not follow all earlier ones, or it has duplicate ids."""


class _SegmentReader:
    """Reads the frames of the segments in order, and gathers watermarks and other facts about them."""

    def __init__(self, base: Snapshot | None, segments: Sequence[SegmentRange]) -> None:
        self.begin = segments[0].base if base is None else base.facts.begin
        self.watermarks = Watermarks({} if base is None else base.watermarks)
        self.time_us = 0 if base is None else base.time_us
        self.lamport = 0 if base is None else base.lamport
        self.chain_crc: int | None = None if base is None else base.facts.chain_crc
        self.is_ascending = True  # the last frame read follows all earlier ones, and has no duplicate ids
        self._next_offset = segments[0].base if base is None else base.offset

    def frames(self, disk: Disk, segment: SegmentRange) -> Iterator[FrameLocation]:
        """Yield the frames of a segment. Raises LogCorrupted, OSError."""
        if segment.base != self._next_offset:
            raise LogCorrupted(segment.path, "frames are missing", offset=self._next_offset, end=segment.base)
        file = disk.open(segment.path, read_only=True)
        try:
            scanner = FrameScanner(
                file, position=0, offset=segment.base, end=file.size(), previous_crc=self.chain_crc
            )
            for location in scanner:
                self._note(location)
                yield location
        except BadFrame as bad:
            raise LogCorrupted(segment.path, bad.reason, position=bad.position, offset=bad.offset) from None
        finally:
            file.close()
        if scanner.offset != segment.end:
            raise LogCorrupted(segment.path, "the file ends early", offset=scanner.offset, end=segment.end)
        self.chain_crc, self._next_offset = scanner.crc, segment.end

    def _note(self, frame: FrameLocation) -> None:
        logged, batch = frame.logged, frame.logged.batch
        if uses_dots(batch):
            self.watermarks.note(batch.origin, batch.epoch, batch.last, batch.clock)
        self.time_us = max(self.time_us, frame.stamp.append_time)
        self.is_ascending = logged.lamport > self.lamport and logged.known_ids is KnownIds.NONE
        self.lamport = max(self.lamport, logged.lamport + batch.count - 1)


def remove_older(disk: Disk, directory: str, offset: int) -> None:
    """Remove the snapshots before this one, which is on stable storage. Raises OSError."""
    for older in snapshot_offsets(disk.list(directory)):
        if older < offset:
            with suppress(FileNotFoundError):
                disk.remove(snapshot_path(directory, older))


def run_to_end(compaction: Compaction, stop: Callable[[], bool] = lambda: False) -> bool:
    """Step until the end, or abort when `stop` returns True; return True if the compaction is complete."""
    while not compaction.step():
        if stop():
            compaction.abort()
            return False
    return True
