"""Appends to the log on disk: each batch gets its offsets and its stamp at once, in memory.

Appended batches wait in the commit queue until a commit takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.recovery.checkpoints import Position
from delta_prop_broker.segments.active_segment import ActiveSegment
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel, KnownIds, Source
from delta_prop_wire.spec import ACK_LEVEL_SHIFT
from delta_prop_wire.stamp import pack_logged_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_broker.log.marks import LogMarks
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.log.tail import Tail
    from delta_prop_broker.log_clock import LogClock
    from delta_prop_broker.retention.retention_quota import RetentionQuota
    from delta_prop_broker.segments.commit_queue import CommitQueue
    from delta_prop_broker.segments.segment import Segments
    from delta_prop_wire.batch import Batch

_DURABLE = int(AckLevel.DURABLE)


class LogAppender:
    """Appends to the active segment and to the tail; the caller has checked that there is capacity."""

    def __init__(
        self,
        segments: Segments,
        tail: Tail,
        quota: RetentionQuota,
        *,
        settings: LogSettings,
        clock: LogClock,
        marks: LogMarks,
        queue: CommitQueue,
        chain_crc: int,
    ) -> None:
        """`chain_crc`: the checksum of the last stamp, which the next one names; 0 if there is none."""
        self._segments = segments
        self._tail = tail
        self._quota = quota
        self._clock = clock
        self._marks = marks
        self._queue = queue
        self._active_segment = ActiveSegment(segments, queue, settings)
        self._chain_crc = chain_crc

    def append(self, batch: Batch, lamport: int, source: Source, known_ids: KnownIds) -> LoggedBatch:
        """Append a batch: assign its offsets."""
        logged = self._append_one(batch, lamport, source, known_ids, self._clock.read())
        self._tail.append(logged)
        return logged

    def append_run(self, batches: Sequence[Batch], lamport: int, source: Source) -> list[LoggedBatch]:
        """Append these batches with one append time."""
        now, appended = self._clock.read(), []
        for batch in batches:
            appended.append(self._append_one(batch, lamport, source, KnownIds.NONE, now))
            lamport += batch.count
        self._tail.extend(appended)
        return appended

    def _append_one(
        self, batch: Batch, lamport: int, source: Source, known_ids: KnownIds, now: int
    ) -> LoggedBatch:
        marks, queue, size, previous = self._marks, self._queue, batch.size, self._chain_crc
        offset, seen_us = marks.next_offset, self._clock.seen_us
        head, crc = pack_logged_head(
            batch, offset, lamport=lamport, source=source, known_ids=known_ids,
            time=now, previous_crc=previous, synced_offset=marks.synced,
        )  # fmt: skip
        logged = LoggedBatch(batch, offset, lamport, source, head, known_ids=known_ids)
        segment = (write := self._active_segment.write_for(size, offset=offset, seen_us=seen_us)).segment
        write.parts += (head, batch.raw)
        write.end += size
        assert segment.index is not None
        segment.index.add(batch, offset=offset, size=size, time=now, previous_crc=previous, crc=crc)
        segment.size += size
        segment.end = marks.next_offset = offset + batch.count
        segment.last_crc = self._chain_crc = crc
        segment.latest_time, segment.seen_last_us = segment.index.latest_time, seen_us
        self._quota.bytes += size
        queue.unwritten_bytes += size
        if batch.attributes >> ACK_LEVEL_SHIFT & 3 >= _DURABLE or source is Source.REPLICA:
            queue.wants_sync = True  # also for a replica, since a forwarder does not send a batch again
        return logged

    def roll(self) -> bool:
        """Seal the last segment with the next commit if it is old; return True if so."""
        last = self._segments.last
        if last is None or not last.size:
            return False
        seen_us = self._clock.poll()
        if is_old := self._active_segment.is_old(last, seen_us):
            self._active_segment.begin(offset=self._marks.next_offset, seen_us=seen_us)
        return is_old

    @property
    def active_segment_start(self) -> int:
        """The first offset of the active segment; `next_offset` while that segment is empty."""
        last = self._segments.last
        if last is None or last.index is None or not last.size:
            return self._marks.next_offset
        return last.base

    def position(self) -> Position:
        """Return the end of the log now, for a checkpoint; usable once `synced` has reached it."""
        last, end = self._segments.last, self._marks.next_offset
        if last is None or last.index is None or not last.size:
            return Position(end, self._chain_crc)
        return Position(end, self._chain_crc, last.index, last.size, last.latest_time)
