"""Compaction: what the log may let go, made into a snapshot first.

Reads the sealed segments behind the snapshot before, and writes the next one, in steps of some milliseconds
and a bounded memory. Nothing of the log is touched: it lets segments go when it is told that the new snapshot
is on stable storage.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_broker.log.damage import BadFrame, LogDamaged
from delta_prop_broker.log.files.frames import Walk
from delta_prop_broker.log.files.names import TEMPORARY
from delta_prop_broker.log.files.snapshot import (
    OriginMark,
    SnapshotFacts,
    SnapshotWriter,
    open_snapshot,
    snapshot_offsets,
    snapshot_path,
)
from delta_prop_broker.log.retention.cells import Frames
from delta_prop_broker.log.retention.merging import Merge
from delta_prop_broker.log.retention.runs import Folding, Frameset, Run, RunBuilder
from delta_prop_wire.control_rows import uses_dots
from delta_prop_wire.delta import Dot, KnownIds
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.files.frames import Place
    from delta_prop_broker.log.files.snapshot import Snapshot

CLOCK_ENTRIES_IN_ALL_MAX = 262_144
_LOOK_BYTES = 4 * 1024 * 1024
STEP_BYTES = 256 * 1024
STEP_ROWS = 2048
"""How much of the log a step takes in."""


class Part(NamedTuple):
    """A sealed segment: its file, its first offset and the one behind its last."""

    path: str
    base: int
    end: int


class Marks:
    """Each origin's watermark, epoch and clock, as batches pass by.

    Clocks are bounded: of an origin the entries that changed last are kept, in all those of the origins that
    wrote last. A clock that has lost entries calls more deltas concurrent than are, never fewer.
    """

    def __init__(self, before: Mapping[int, OriginMark]) -> None:
        self._last: dict[int, tuple[int, int]] = {}
        self._clocks: OrderedDict[int, dict[int, int]] = OrderedDict()
        self._entries = 0
        for origin, mark in before.items():
            self.note(origin, mark.epoch, mark.counter, mark.clock)

    def note(self, origin: int, epoch: int, counter: int, entries: Sequence[Dot]) -> None:
        """A batch of this origin, its last counter, and the clock entries that it carries."""
        known, _ = self._last.get(origin, (0, 0))
        self._last[origin] = (max(known, epoch), counter)
        if not entries:
            return
        clock = self._clocks.setdefault(origin, {})
        self._clocks.move_to_end(origin)
        for other, seen in entries:
            before = clock.pop(other, 0)
            clock[other] = max(before, seen)
            self._entries += not before
        while len(clock) > CLOCK_ENTRIES_MAX:
            del clock[next(iter(clock))]
            self._entries -= 1
        while self._entries > CLOCK_ENTRIES_IN_ALL_MAX:
            self._entries -= len(self._clocks.popitem(last=False)[1])

    def all(self) -> dict[int, OriginMark]:
        """Where each origin stands."""
        return {
            origin: OriginMark(
                epoch, counter, tuple(Dot(*entry) for entry in sorted(self._clocks.get(origin, {}).items()))
            )
            for origin, (epoch, counter) in self._last.items()
        }


class Compaction:
    """One compaction, from the snapshot at `previous` (None: from the first segment) to the last one's end.

    `step` until it says so; `abort` at any time instead. Each call of either may wait for the disk, and all
    come one at a time. `run_bytes_max`: about the memory that is taken for sorting; what is more is set
    aside in files, which go with the compaction. It ends with an OSError where less than `free_bytes_min`
    are left on the disk.
    """

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        log_id: bytes,
        parts: Sequence[Part],
        previous: int | None,
        run_bytes_max: int,
        free_bytes_min: int = 0,
    ) -> None:
        self.offset = parts[-1].end
        self.rows_read = self.bytes_read = self.runs = 0
        self.snapshot_bytes = self.snapshot_rows = 0
        self._disk = disk
        self._directory = directory
        self._log_id = log_id
        self._parts = parts
        self._previous = previous
        self._run_bytes_max = run_bytes_max
        self._free_bytes_min = free_bytes_min
        self._bytes_looked_at = 0
        self._set_aside: list[Frameset] = []
        self._writer: SnapshotWriter | None = None
        self._base: Snapshot | None = None
        self._steps = self._work()

    def step(self) -> bool:
        """Go on for some milliseconds; whether the new snapshot is on stable storage.

        Raises LogDamaged, OSError, Refused where a state is too large for a frame; it has ended then.
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
        """Give up, and leave nothing behind that the disk lets go of."""
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
        folding = Folding()
        gathered = _Gathered(base, self._parts)
        runs: list[Run] = []
        in_order = True
        while True:
            try:
                yield from self._gather(gathered, runs, folding, in_order=in_order)
                break
            except _OutOfOrder:  # a forwarded delta may sort before one that was taken in, or be its twin
                self._drop_runs()
                gathered, runs, folding, in_order = _Gathered(base, self._parts), [], Folding(), False
        facts = SnapshotFacts(
            self._log_id, self.offset, gathered.begin, gathered.time_us, gathered.lamport, gathered.chain or 0
        )
        writer = self._writer = SnapshotWriter(self._disk, self._directory, facts)
        out = Frames(writer.add, states=True)
        for _ in Merge(() if base is None else base.frames(), runs, folding, out).run():
            self._check_room(writer.bytes)
            yield
        late = folding.late + (0 if base is None else base.facts.late)
        unfolded = folding.unfolded + (0 if base is None else base.facts.unfolded)
        made = writer.finish(gathered.marks.all(), alive=out.alive, late=late, unfolded=unfolded)
        self._writer = None
        self.snapshot_bytes, self.snapshot_rows = made.bytes, made.rows
        made.close()
        if base is not None:
            base.close()
            self._base = None
        with suppress(OSError):  # done all the same: what stays is removed at the next start
            self._drop_runs()
            remove_older(self._disk, self._directory, self.offset)

    def _gather(
        self, gathered: _Gathered, runs: list[Run], folding: Folding, *, in_order: bool
    ) -> Iterator[None]:
        builder = RunBuilder(in_order)
        rows = size = 0
        for part in self._parts:
            for place in gathered.frames(self._disk, part):
                batch = place.logged.batch
                if in_order and not gathered.rises:
                    raise _OutOfOrder
                if not batch.is_control:
                    builder.add(place.logged)
                rows, size = rows + batch.count, size + place.size
                if builder.bytes >= self._run_bytes_max:
                    yield from self._close(builder, runs, folding, aside=True)
                if rows >= STEP_ROWS or size >= STEP_BYTES:
                    self.rows_read, self.bytes_read = self.rows_read + rows, self.bytes_read + size
                    rows = size = 0
                    yield
        self.rows_read, self.bytes_read = self.rows_read + rows, self.bytes_read + size
        if builder.bytes:
            yield from self._close(builder, runs, folding, aside=False)

    def _close(
        self, builder: RunBuilder, runs: list[Run], folding: Folding, *, aside: bool
    ) -> Iterator[None]:
        """Make what the builder holds into a run."""
        self.runs += 1
        stem = f"{snapshot_path(self._directory, self.offset)}-{len(runs)}"
        kept = []
        for kind in ("rows", "changes"):
            one = Frameset(self._disk, f"{stem}-{kind}{TEMPORARY}") if aside else Frameset()
            self._set_aside.append(one)
            kept.append(one)
        run = Run(*kept)
        yield from builder.close(run, folding)
        runs.append(run)

    def _check_room(self, written: int) -> None:
        """Stop before the disk is full: the log's own commits are to find room."""
        if written < self._bytes_looked_at:
            return
        self._bytes_looked_at = written + _LOOK_BYTES
        free = self._disk.free_bytes()
        if free < self._free_bytes_min:
            raise OSError(
                errno.ENOSPC, f"{free} bytes are left, of which {self._free_bytes_min} stay free for the log"
            )

    def _drop_runs(self) -> None:
        while self._set_aside:
            self._set_aside.pop().drop()


class _OutOfOrder(Exception):
    """A frame's Lamport numbers are not above all before, or it repeats ids."""


class _Gathered:
    """What the frames of the segments say beside their rows, as they are read one behind the other."""

    def __init__(self, base: Snapshot | None, parts: Sequence[Part]) -> None:
        self.begin = parts[0].base if base is None else base.facts.begin
        self.marks = Marks({} if base is None else base.watermarks)
        self.time_us = 0 if base is None else base.time_us
        self.lamport = 0 if base is None else base.lamport
        self.chain: int | None = None if base is None else base.facts.chain
        self.rises = True
        self._from = parts[0].base if base is None else base.offset

    def frames(self, disk: Disk, part: Part) -> Iterator[Place]:
        """The frames of a segment. Raises LogDamaged, OSError."""
        if part.base != self._from:
            raise LogDamaged(part.path, "frames are missing", offset=self._from, end=part.base)
        file = disk.open(part.path, read_only=True)
        try:
            walk = Walk(file, position=0, offset=part.base, end=file.size(), previous_crc=self.chain)
            for place in walk:
                self._note(place)
                yield place
        except BadFrame as bad:
            raise LogDamaged(part.path, bad.reason, position=bad.position, offset=bad.offset) from None
        finally:
            file.close()
        if walk.offset != part.end:
            raise LogDamaged(part.path, "the file ends early", offset=walk.offset, end=part.end)
        self.chain, self._from = walk.crc, part.end

    def _note(self, place: Place) -> None:
        logged, batch = place.logged, place.logged.batch
        if uses_dots(batch):
            self.marks.note(batch.origin, batch.epoch, batch.last, batch.clock)
        self.time_us = max(self.time_us, place.stamp.append_time)
        self.rises = logged.lamport > self.lamport and logged.known_ids is KnownIds.NONE
        self.lamport = max(self.lamport, logged.lamport + batch.count - 1)


def remove_older(disk: Disk, directory: str, offset: int) -> None:
    """Remove the snapshots before this one, which is on stable storage. Raises OSError."""
    for older in snapshot_offsets(disk.list(directory)):
        if older < offset:
            with suppress(FileNotFoundError):
                disk.remove(snapshot_path(directory, older))


def run_to_end(compaction: Compaction, stop: Callable[[], bool] = lambda: False) -> bool:
    """Step until it is done, or until `stop` says so; whether it is done."""
    while not compaction.step():
        if stop():
            compaction.abort()
            return False
    return True
