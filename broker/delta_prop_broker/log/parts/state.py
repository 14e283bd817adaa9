"""What the parts of the log on disk share: who it is, its marks, and what it is made of.

Each part beside this one is something the log does with it: `keeping` (and making room), `appending`,
`committing`, `reading`. `durable.py` opens and ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log.files.checkpoints import Position
from delta_prop_broker.log.files.names import DIRECTORY
from delta_prop_broker.log.files.stretch import Stretches
from delta_prop_broker.log.log_clock import LogClock
from delta_prop_broker.log.parts.free_space import FreeSpace
from delta_prop_broker.log.parts.growing import Growing
from delta_prop_broker.log.parts.tail import Tail
from delta_prop_broker.log.retention.cover import Cover
from delta_prop_broker.log.retention.holders import Holders
from delta_prop_broker.log.retention.rewriting import Rewriter
from delta_prop_broker.log.retention.room import Room
from delta_prop_broker.log.statistics import DurableLogStatistics
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk, Lock
    from delta_prop_broker.log.files.reserve import Reserve
    from delta_prop_broker.log.files.segment import Segment
    from delta_prop_broker.log.files.times import Times
    from delta_prop_broker.log.log_clock import Clock
    from delta_prop_broker.log.parts.commit import Commit
    from delta_prop_broker.log.parts.recovered import Recovered
    from delta_prop_broker.log.settings import LogSettings


class LogState:
    """A log on disk, as far as all its parts know it."""

    level = AckLevel.DURABLE

    def __init__(
        self,
        disk: Disk,
        recovered: Recovered,
        *,
        settings: LogSettings,
        draw: Callable[[int], bytes],
        clock: Clock,
        times: Times,
        lock: Lock | None,
        reserve: Reserve,
    ) -> None:
        """Use `DurableLog.open`."""
        self.settings = settings
        self.reserve = reserve
        self._batch_bytes_max = settings.bytes_max - settings.segment_bytes_max
        self._disk = disk
        self._draw = draw
        self._lock = lock
        self._holders = Holders()
        self.committed_frames = self.committed_bytes = 0
        """What this object has written so far."""
        self.needed_from: int | None = None
        """From where on a start would read it, if it were now: that stays, whoever needs it no more."""
        self._closed = False
        self._short_of: int | None = None
        """The size of what found no room last; None since there was some."""
        self._commits = self._syncs_skipped = self._removed_segments = self._refused = self._reopened = 0
        self._cover = Cover(disk, DIRECTORY, settings=settings, holders=self._holders)
        start, end, read_only = recovered.start, recovered.next_offset, recovered.mark is None
        self._cover.open(recovered.identity.log_id, start=start, end=end, read_only=read_only)
        latest = max((segment.latest_time for segment in recovered.segments.all), default=0)
        latest = max(latest, times.time_us, self._cover.time_us)
        self.clock = LogClock(clock, seen_us=times.seen_us, time_us=latest, jump=times.jump)
        self._free = FreeSpace(disk, lambda: self.clock.seen_us, read_only=read_only)
        self._take_over(recovered, times)
        self.stretches = Stretches(disk, lambda: (self._segments, self._start, self.visible))
        """Readers of whole frames as they lie in the files."""

    def _take_over(self, recovered: Recovered, times: Times) -> None:
        """Go on from what is on disk; nothing waits to be written. `times`: how old the segments are."""
        for segment in recovered.segments.all:
            # A segment that has grown since, or that is not known, may be as young as this moment.
            segment.seen_last_us = times.ended_us.get(segment.base, self.clock.seen_us)
            segment.seen_first_us = segment.seen_last_us
            if times.growing is not None and times.growing[0] == segment.base:
                segment.seen_first_us = times.growing[1]
        self.next_offset = recovered.next_offset
        self.written = self.synced = recovered.synced
        self.failure: Exception | None = None
        self.checkpoints = recovered.checkpoints
        """Those that fit this log, newest first. Whoever writes one has it to itself meanwhile."""
        self._identity = recovered.identity
        self._segments = recovered.segments
        self._chain = recovered.chain or 0
        self._start = recovered.start
        self._mark = recovered.mark
        self._tail = Tail(recovered.next_offset, bytes_max=self.settings.tail_bytes_max)
        self._room = Room(self.settings, self._segments, self._holders, self._cover)
        self._rewriter = Rewriter(self._disk, DIRECTORY, self._segments, self._room, self.settings)
        self._growing = Growing(self._segments, self.settings)
        self._pending_sync = False
        self._unwritten_bytes = 0
        self._running: Commit | None = None
        self._removed: list[Segment] = []

    @property
    def log_id(self) -> bytes:
        """16 bytes drawn when the log was created."""
        return self._identity.log_id

    @property
    def epoch(self) -> int:
        """Grows at each opening after which a tail may be missing: whenever the log had not been closed."""
        return self._identity.epoch

    @property
    def openings(self) -> int:
        """How often it was opened to be written, or recovered, after it was made: it grows each time."""
        return self._identity.openings

    def epoch_end(self, epoch: int) -> int | None:
        """Where a past epoch ended (exclusive); None where it is the present one, or one still to come."""
        return self._identity.epoch_end(epoch)

    @property
    def accepting(self) -> bool:
        """False while half of what may wait for the disk waits. A stopped log is asked, and refuses."""
        return self.failure is not None or self._unwritten_bytes * 2 < self.settings.unwritten_bytes_max

    @property
    def first_offset(self) -> int:
        """The oldest offset still held."""
        return self._start

    @property
    def visible(self) -> int:
        """Up to where readers may read: what is synced, or written, as the settings say."""
        return self.synced if self.settings.level is AckLevel.DURABLE else self.written

    def reached(self, level: AckLevel) -> int:
        """The mark up to which (exclusive) rows are kept as safely as this level says."""
        if level is AckLevel.MEMORY:
            return self.next_offset
        return self.written if level is AckLevel.LOGGED else self.synced

    @property
    def growing_from(self) -> int:
        """The first offset of the segment that grows, as `position` tells it."""
        last = self._segments.last
        return self.next_offset if last is None or last.index is None or not last.size else last.index.base

    def position(self) -> Position:
        """Where the log ends now, as a checkpoint needs it; usable once `synced` has come there."""
        last = self._segments.last
        if last is None or last.index is None or not last.size:
            return Position(self.next_offset, self._chain)
        return Position(self.next_offset, self._chain, last.index, last.size, last.latest_time)

    @property
    def unwritten_bytes(self) -> int:
        """What was appended and is not on disk yet."""
        return self._unwritten_bytes

    @property
    def free_bytes(self) -> int:
        """What the disk has left, as far as is known."""
        return self._free.bytes

    def statistics(self) -> DurableLogStatistics:
        """A snapshot."""
        room, cover, segments = self._room, self._cover, self._segments
        return DurableLogStatistics(
            first_offset=self.first_offset, next_offset=self.next_offset, written=self.written,
            synced=self.synced, visible=self.visible, segments=len(segments.all),
            compressed_segments=sum(one.compressed for one in segments.all), bytes=room.bytes,
            bytes_max=self.settings.bytes_max, unwritten_bytes=self._unwritten_bytes,
            tail_bytes=self._tail.bytes, commits=self._commits, syncs_skipped=self._syncs_skipped,
            removed_segments=self._removed_segments, indexes_rebuilt=segments.indexes_rebuilt,
            refused=self._refused, held_by=self._holders.slowest(), reopened=self._reopened,
            reserve_bytes=self.reserve.bytes, snapshot_offset=cover.offset, snapshot_rows=cover.rows,
            snapshot_bytes=cover.bytes, snapshots_made=cover.made, compacting=cover.under_way,
            time_us=self.clock.time_us, clock_ahead_s=self.clock.ahead_us / 1e6,
            clock_jumps=self.clock.jumps,
        )  # fmt: skip
