"""Compaction: makes a snapshot of rows that the log is about to remove.

Reads the sealed segments after the previous snapshot, and writes the next snapshot, in steps of a few
milliseconds with bounded memory. It does not change the log, which removes segments once the new snapshot is
on stable storage.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.corruption import BadFrame, LogCorrupted
from delta_prop_broker.retention.merging import Merge
from delta_prop_broker.retention.raw_rows import FrameBuilder
from delta_prop_broker.retention.snapshot import (
    OriginWatermark,
    PresentSnapshot,
    Snapshot,
    SnapshotFacts,
    SnapshotWriter,
    open_snapshot,
    present_snapshot,
    snapshot_offsets,
    snapshot_path,
)
from delta_prop_broker.retention.sorted_run import ChangeFolder, RunBuilder, SortedRun, SpillFile
from delta_prop_broker.retention.tombstones import NO_AGE, NO_LIMIT, Forgotten, TombstoneLimit
from delta_prop_broker.segments.frames import FrameLocation, FrameScanner
from delta_prop_broker.segments.paths import TEMPORARY
from delta_prop_wire.control_rows import uses_dots
from delta_prop_wire.delta import Dot, KnownIds
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk

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
    compaction removes at its end. `made`: the new snapshot, once `step` has returned True. `step` raises
    OSError when less than `free_bytes_min` are free on the disk. `tombstones`: those that the snapshot leaves
    out.
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
        tombstones: TombstoneLimit = NO_LIMIT,
    ) -> None:
        self.offset = segments[-1].end
        self.made = PresentSnapshot()
        self._disk = disk
        self._directory = directory
        self._log_id = log_id
        self._segments = segments
        self._runs = _SortedRuns(disk, snapshot_path(directory, self.offset))
        self._run_bytes_max = run_bytes_max
        self._writer: SnapshotWriter | None = None
        self._base: Snapshot | None = None
        self._steps = self._work(previous, tombstones, _DiskSpace(disk, free_bytes_min))

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
            self._runs.drop()
        if self._writer is not None:
            with suppress(OSError):
                self._writer.discard()
            self._writer = None
        if self._base is not None:
            self._base.close()
            self._base = None

    @property
    def run_count(self) -> int:
        """Number of runs that the rows were sorted in so far."""
        return self._runs.count

    def _work(
        self, previous: int | None, limit: TombstoneLimit, space: _DiskSpace
    ) -> Generator[None, None, None]:
        base = None
        if previous is not None:
            base = self._base = open_snapshot(self._disk, self._directory, previous)
        folder = ChangeFolder()
        reader = _SegmentReader(base, self._segments)
        in_order = True
        while True:
            try:
                yield from self._gather(reader, folder, in_order=in_order)
                break
            # A forwarded delta may sort before a delta that was read already, or be a duplicate of one.
            except _OutOfOrderFrame:
                self._runs.drop()
                reader = _SegmentReader(base, self._segments)
                folder, in_order = ChangeFolder(), False
        age = NO_AGE if base is None else base.facts.tombstones
        age = age.next(self.offset, seen_us=limit.seen_us, old_us=limit.old_us)
        facts = SnapshotFacts(
            self._log_id, self.offset, reader.begin, reader.time_us, reader.lamport, reader.chain_crc or 0,
            tombstones=age,
        )  # fmt: skip
        writer = self._writer = SnapshotWriter(self._disk, self._directory, facts)
        out = FrameBuilder(writer, states=True)
        frames, forgotten = () if base is None else base.frames(), Forgotten(age.below, limit.erased)
        for _ in Merge(frames, self._runs.all, folder, out, forgotten=forgotten).run():
            space.check(writer.bytes)
            yield
        out_of_order = folder.out_of_order + (0 if base is None else base.facts.out_of_order)
        unfolded = folder.unfolded + (0 if base is None else base.facts.unfolded)
        snapshot = writer.finish(
            reader.watermarks.all(), alive=out.alive, out_of_order=out_of_order, unfolded=unfolded
        )
        self._writer = None
        self.made = present_snapshot(snapshot)
        snapshot.close()
        if base is not None:
            base.close()
            self._base = None
        with suppress(OSError):  # the snapshot is complete: the next start removes the other files
            self._runs.drop()
            remove_older(self._disk, self._directory, self.offset)

    def _gather(self, reader: _SegmentReader, folder: ChangeFolder, *, in_order: bool) -> Iterator[None]:
        """Read all segments, in steps, and add their rows to the runs, sorted."""
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
                    yield from self._runs.add(builder, folder, spill=True)
                if row_count >= STEP_ROWS or size >= STEP_BYTES:
                    row_count = size = 0
                    yield
        if builder.bytes:
            yield from self._runs.add(builder, folder, spill=False)


class _SortedRuns:
    """The sorted runs of a compaction, in memory or spilled to files named after `stem`."""

    def __init__(self, disk: Disk, stem: str) -> None:
        self.all: list[SortedRun] = []
        self.count = 0
        """Number of runs that were added, dropped ones included."""
        self._disk = disk
        self._stem = stem
        self._files: list[SpillFile] = []

    def add(self, builder: RunBuilder, folder: ChangeFolder, *, spill: bool) -> Iterator[None]:
        """Write the builder's rows as a run, in small steps, and empty the builder. Raises OSError."""
        self.count += 1
        files = []
        for kind in ("rows", "changes"):
            path = f"{self._stem}-{len(self.all)}-{kind}{TEMPORARY}"
            file = SpillFile(self._disk, path) if spill else SpillFile()
            self._files.append(file)
            files.append(file)
        run = SortedRun(*files)
        yield from builder.close(run, folder)
        self.all.append(run)

    def drop(self) -> None:
        """Drop all runs, and remove their files. Raises OSError."""
        self.all = []
        while self._files:
            self._files.pop().drop()


class _DiskSpace:
    """The space that a compaction leaves free, since the log's own commits need it."""

    def __init__(self, disk: Disk, bytes_min: int) -> None:
        self._disk = disk
        self._bytes_min = bytes_min
        self._next_poll_bytes = 0

    def check(self, written: int) -> None:
        """Raise OSError before the disk is full. `written`: bytes written so far."""
        if written < self._next_poll_bytes:
            return
        self._next_poll_bytes = written + _POLL_BYTES
        free = self._disk.free_bytes()
        if free < self._bytes_min:
            raise OSError(
                errno.ENOSPC, f"{free} bytes are left, of which {self._bytes_min} stay free for the log"
            )


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
