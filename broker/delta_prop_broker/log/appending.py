"""Appending to the log on disk: each batch gets its offsets and its stamp at once, in memory.

Appended batches wait in `ActiveSegment` until a commit takes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.log import refusals
from delta_prop_broker.log.retaining import Retaining
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import AckLevel, KnownIds, Source
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import ACK_LEVEL_SHIFT
from delta_prop_wire.stamp import pack_logged_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_wire.batch import Batch

_DURABLE = int(AckLevel.DURABLE)


class Appending(Retaining):
    """Appends batches as far as the log has capacity."""

    def append(
        self, batch: Batch, *, lamport: int, source: Source, known_ids: KnownIds = KnownIds.NONE
    ) -> LoggedBatch:
        """Append a batch in memory: assign its offsets. If it raises Refused, nothing has changed."""
        if self._recovery_point is None or self._closed:
            raise UsageError("the log is open read-only, or closed: open it for writing")
        size, level = batch.size, batch.attributes >> ACK_LEVEL_SHIFT & 3
        # The level of a forwarded batch counts only at the service where it entered.
        refusal = refusals.level_refusal(batch) if level > _DURABLE and source is not Source.REPLICA else None
        if refusal is None and not self._has_capacity(size):
            refusal = self._refusal(size)
        if refusal is not None:
            self._refused_count += 1
            raise refusal
        self._tail.append(logged := self._append_one(batch, lamport, source, known_ids, self.clock.read()))
        return logged

    def can_append(self, batches: Sequence[Batch]) -> bool:
        """Return True if `append_run` would take these; removes old segments that no holder needs."""
        size, level = batches[0].size, batches[0].attributes >> ACK_LEVEL_SHIFT & 3
        if len(batches) > 1:
            size = sum([batch.size for batch in batches])
            level = max([batch.attributes >> ACK_LEVEL_SHIFT & 3 for batch in batches])
        if self._recovery_point is None or self._closed or level > _DURABLE or size > self._batch_bytes_max:
            return False
        return self._has_capacity(size) or self._refusal(size) is None

    def append_run(self, batches: Sequence[Batch], *, lamport: int, source: Source) -> list[LoggedBatch]:
        """Append these batches with one append time; the caller just called `can_append`."""
        now, appended = self.clock.read(), []
        for batch in batches:
            appended.append(self._append_one(batch, lamport, source, KnownIds.NONE, now))
            lamport += batch.count
        self._tail.extend(appended)
        return appended

    def _append_one(
        self, batch: Batch, lamport: int, source: Source, known_ids: KnownIds, now: int
    ) -> LoggedBatch:
        size, offset, previous = batch.size, self.next_offset, self._chain_crc
        seen_us = self.clock.seen_us
        head, crc = pack_logged_head(
            batch, offset, lamport=lamport, source=source, known_ids=known_ids,
            time=now, previous_crc=previous, synced_offset=self.synced,
        )  # fmt: skip
        logged = LoggedBatch(batch, offset, lamport, source, head, known_ids=known_ids)
        segment = (write := self._active_segment.write_for(size, offset=offset, seen_us=seen_us)).segment
        write.parts += (head, batch.raw)
        write.end += size
        assert segment.index is not None
        segment.index.add(batch, offset=offset, size=size, time=now, previous_crc=previous, crc=crc)
        segment.size += size
        segment.end = self.next_offset = offset + batch.count
        segment.last_crc = self._chain_crc = crc
        segment.latest_time, segment.seen_last_us = segment.index.latest_time, seen_us
        self._quota.bytes += size
        self._unwritten_bytes += size
        if batch.attributes >> ACK_LEVEL_SHIFT & 3 >= _DURABLE or source is Source.REPLICA:
            self._pending_sync = True  # also for a replica, since a forwarder does not send a batch again
        return logged
